"""`tokenmill keys`: makes API keys and lists whom they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import option
from tokenmill.cli.terminal import note

keys = typer.Typer(no_args_is_help=True, help="Make API keys for `tokenmill serve --keys FILE`.")

File = Annotated[Path, typer.Argument(help="The file of keys; it holds hashes only.")]


@keys.command()
def add(
    file: File,
    tenant: Annotated[str, typer.Argument(help="Whom the key belongs to.")],
    requests_per_minute: Annotated[float | None, option("For all keys of the tenant together.")] = None,
    tokens_per_minute: Annotated[float | None, option("Prompt and output.")] = None,
    concurrency: Annotated[int | None, option("Requests at once.")] = None,
    priority: Annotated[str | None, option("The most urgent class: realtime, api or batch.")] = None,
    adapter: Annotated[list[str] | None, option("A LoRA adapter that it may name; unset: all.")] = None,
    operator: Annotated[
        bool, option("May see in /metrics what each tenant uses; for Prometheus.", "--operator")
    ] = False,
) -> None:
    """Make a key and print it. It is shown this once; a running server knows it within a second."""
    from tokenmill.serve.http.api_keys import add_key

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "priority": priority,
        "adapters": adapter or None,
        "operator": operator or None,
    }
    typer.echo(add_key(file, tenant, limits))


@keys.command(name="list")
def list_tenants(file: File) -> None:
    """Whom there are keys for, and their limits."""
    from tokenmill.serve.http.api_keys import read_tenants

    for tenant, entry in read_tenants(file).items():
        limits = "".join(f", {name} {value}" for name, value in entry.items() if name != "keys")
        note(f"{tenant}: {len(entry['keys'])} keys{limits}")
