"""docs/usage.md lists every setting of an engine with its default, and no other."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

from tokenmill.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
USAGE = ROOT / "docs" / "usage.md"


def test_every_setting_is_listed_with_its_default():
    section = USAGE.read_text().partition("## Settings of an engine")[2].partition("\n#")[0]
    listed = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, defaults = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3])
            listed |= dict(zip(names, defaults, strict=True))
    assert listed == {one.name: repr(one.default).replace("'", '"') for one in fields(EngineConfig)}


def test_the_table_is_made_from_the_declaration():
    """`python scripts/settings_table.py` writes it."""
    with_table = runpy.run_path(str(ROOT / "scripts" / "settings_table.py"))["with_table"]
    page = USAGE.read_text()
    assert with_table(page) == page
