"""An engine process that verifies drafts whatever they cost: which ones must not depend on how busy the machine is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "speculation")]
from tiny_drafts import make_drafts_free

from tokenmill.serve.engine.main import main

if __name__ == "__main__":
    make_drafts_free(pytest.MonkeyPatch())
    sys.exit(main())
