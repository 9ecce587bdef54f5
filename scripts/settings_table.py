"""Write the table of an engine's settings into docs/usage.md, from their declaration in tokenmill/config.py."""

from __future__ import annotations

from pathlib import Path

from tokenmill.config import OPTIONS
from tokenmill.option import DERIVED, Option

USAGE = Path(__file__).resolve().parents[1] / "docs" / "usage.md"
HEAD = "| setting | default | values | meaning |\n|---|---|---|---|\n"


def table() -> str:
    return HEAD + "".join(_row(one) for one in OPTIONS.values())


def with_table(page: str) -> str:
    """The page with the table as it should be."""
    before, found, after = page.partition("| setting | default |")
    assert found, "there is no table of settings"
    rest = after.partition("\n\n")[2]
    return f"{before}{table()}\n{rest}"


def _row(one: Option) -> str:
    parts = [one.help]
    if one.solved:
        parts.append(f"solved: {one.solved}")
    elif one.unset:
        parts.append(f"`None`: {one.unset}")
    text = "; ".join(parts)
    for commands, value, why in _others(one):
        shown = "" if callable(value) or value is DERIVED else f"`{_code(value)}`, "
        text += f"; `{commands}`: {shown}{why}"
    text += f". {one.more}" if one.more else ""
    return f"| `{one.name}` | `{_code(one.default)}` | {_values(one)} | {text} |\n"


def _others(one: Option) -> list[tuple[str, object, str]]:
    """Commands with the same default of their own stand together."""
    found: dict[str, list[str]] = {}
    for command, other in one.by_command.items():
        found.setdefault(other.why, []).append(command)
    return [("`, `".join(names), one.by_command[names[0]].value, why) for why, names in found.items()]


def _values(one: Option) -> str:
    if one.choices:
        return ", ".join(f"`{_code(choice)}`" for choice in one.choices)
    if one.kind == "bool":
        return "`True`, `False`"
    return one.range() if one.kind in ("int", "float") else one.form


def _code(value: object) -> str:
    return repr(value).replace("'", '"')


if __name__ == "__main__":
    USAGE.write_text(with_table(USAGE.read_text()))
    print(f"wrote the table of {len(OPTIONS)} settings into {USAGE}")
