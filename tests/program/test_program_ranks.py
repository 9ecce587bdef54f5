"""Programs on an engine of several ranks: what is forked, continued, chosen and given a form is as on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "sampling"))
from grammar_models import open_model, write_model

from tokenmill.program import ProgramState, gen, program, select

STORY = "Once upon a time there was a mill by a river, and the mill turned day and night. "


@program
def tale(s: ProgramState, number: int) -> list[str]:
    s += STORY + f"{number}: " + gen("first", max_tokens=9, temperature=1.0, seed=number, ignore_eos=True)
    s += " so " + gen("form", max_tokens=20, temperature=0, regex="[a-c]{3,6}[0-9]")
    ways = s.fork(3)
    for turn, one in enumerate(ways):
        one += f" {turn} " + gen("end", max_tokens=7, temperature=1.0, seed=turn, ignore_eos=True)
    s += " and " + select("choice", ["yes", "no", "perhaps so"])
    s += gen("last", max_tokens=5, temperature=0, ignore_eos=True)
    return [s["first"], s["form"], *ways["end"], s["choice"], s["last"]]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of one machine, as on Linux")
@pytest.mark.parametrize("parallel", ["pp2", "tp2"])
def test_several_ranks_say_what_one_says(tmp_path: Path, parallel: str) -> None:
    model = write_model(tmp_path / "model")
    batch: list[dict[str, Any]] = [{"number": number} for number in range(6)]
    said = {}
    for layout in ("auto", parallel):
        with open_model(model, **({} if layout == "auto" else {"parallel": layout})) as llm:
            states = tale.run_batch(llm, batch)
            said[layout] = [state.result for state in states]
            usage = states[0].usage
            assert usage.saved_tokens > usage.computed_tokens
            engine = llm._built.engine
            assert not engine.has_work and not len(engine.scheduler.life.held)
            engine.scheduler.check_integrity()
    assert said[parallel] == said["auto"]
