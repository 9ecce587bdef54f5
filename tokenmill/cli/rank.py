"""`tokenmill rank`: this machine computes a part of an engine that runs on another one."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Annotated

from tokenmill.cli.options import option
from tokenmill.cli.terminal import note, progress
from tokenmill.config import OPTIONS
from tokenmill.errors import ConfigError
from tokenmill.peers import address_of, read_secret


def rank(
    join: Annotated[str, option("Address at which the engine waits (its --rank-listen), as 10.0.0.1:7200.")],
    rank_secret_file: Annotated[str, option("File with the secret that the engine has, too.")],
    model: Annotated[
        str | None,
        option("The model's copy on this machine; unset: under the engine's name for it.", "--model", "-m"),
    ] = None,
    ranks: Annotated[int, option("How many ranks of the engine this machine takes.", min=1)] = 1,
    threads: Annotated[
        int | None, option("Threads of each rank; unset: the cores divided among them.", min=1, show_default=False)
    ] = None,
    listen: Annotated[
        str | None,
        option(
            "Where ranks of further machines reach this one; unset: a free port of the address that the engine sees. "
            "Two machines need none.",
            show_default=False,
        ),
    ] = None,
    cache_dir: Annotated[
        str | None, option(f"{OPTIONS['cache_dir'].help[:1].upper()}{OPTIONS['cache_dir'].help[1:]}.")
    ] = None,
) -> None:
    """Compute a part of an engine on another machine: of `tokenmill serve --parallel pp2 --rank-listen 0.0.0.0:7200`.

    It joins again whenever the engine or the network was gone. Ctrl-C or SIGTERM ends it; the engine waits for another
    one then, and loses no request.
    """
    where, at = _address("--join", join), None if listen is None else _address("--listen", listen)
    secret = read_secret(rank_secret_file, "--rank-secret-file")
    if sys.platform != "linux":
        raise ConfigError(f"ranks of other machines need Linux, and this is {sys.platform}")
    note(f"joining {join}")
    with progress() as report:
        import torch

        from tokenmill.engine.ranks.agent import Agent, Offer

        each = threads or max(1, torch.get_num_threads() // ranks)
        agent = Agent(where, secret, Offer(ranks, model, each, cache_dir, at), note, report)

        def stop(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stop)
        try:
            agent.run()
        except KeyboardInterrupt:
            note("left the engine")
        finally:
            agent.close()


def _address(name: str, text: str) -> tuple[str, int]:
    try:
        return address_of(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be host:port, such as 10.0.0.1:7200") from None
