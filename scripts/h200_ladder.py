"""Climbs the ladder on a public model's shape with random weights; further words go to `tokenmill ladder`.

    python scripts/h200_ladder.py llama3-8b --seconds 6 --json ladder.json                # 3 to 4 minutes
    python scripts/h200_ladder.py llama3-8b --html ladder.html --plot docs/plots --json ladder.json

The JSON is written anew after every rung: a run that is cut short keeps what it has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from h200_workloads import COMMON, SHAPES

from tokenmill.cli.app import app


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in SHAPES:
        sys.exit(f"say which shape: {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / sys.argv[1]
        model.mkdir()
        (model / "config.json").write_text(json.dumps(COMMON | SHAPES[sys.argv[1]]))
        app(["ladder", str(model), "--load-format", "dummy", *sys.argv[2:]])


if __name__ == "__main__":
    main()
