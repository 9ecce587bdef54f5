"""Drafts of structured answers on a device that runs behind the host: masks lie where recorded steps look for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fake_graphs import FakeRecorder
from test_drafts_on_device import FakeStaging, Graphs, behind_the_host, runner_of

sys.path.append(str(Path(__file__).parents[1] / "sampling"))
from grammar_models import open_model, write_model

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner import cuda_graphs
from tokenmill.engine.runner.recordings import WIDTHS, Kind
from tokenmill.engine.speculation import choose
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.ops import shaping
from tokenmill.sampling import grammar
from tokenmill.step_time import FittedStepTime

pytest.importorskip("llguidance")

FORMS: list[Any] = [
    {"regex": "(item number [0-9]: (yes|no) ){3}end of the list"},
    None,
    {"choice": ["the first of them", "the second of them"]},
    {"json": {"type": "object", "properties": {"a_long_property_name": {"enum": ["one thing", "another thing"]}},
              "required": ["a_long_property_name"], "additionalProperties": False}},
    None,
]  # fmt: skip


def requests(temperature: float) -> list[Request]:
    found = []
    for k, form in enumerate(FORMS):
        params = SamplingParams(structured=form, temperature=temperature, seed=k, ignore_eos=form is None)
        prompt = [10 + k, *range(40, 46 + 3 * k)]
        found.append(Request(f"r{k}", prompt, params, max_tokens=90, seed=k))
    return found


def run(engine: Engine, temperature: float) -> tuple[dict[str, list[int]], int, int]:
    """What was said, in how many steps, and how many rows started where only the device knew."""
    some, steps, uncertain = requests(temperature), 0, 0
    for one in some[:3]:
        engine.add(one)
    late = some[3:]
    while engine.has_work or late:
        if steps == 6:
            for one in late:
                engine.add(one)
            late = []
        launched = engine.scheduler.stats.steps
        engine.step()
        steps += engine.scheduler.stats.steps > launched
        uncertain += sum(len(step.slack) for step, *_ in engine._in_flight)
    assert engine.scheduler.stats.failed_steps == 0 and not any(one.error for one in some)
    return {one.id: one.output for one in some}, steps, uncertain


def opened(model: str, **options: Any) -> LLM:
    return open_model(model, ops="reference", cuda_graphs=False, enable_prefix_caching=False, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("recorded", [False, True])
def test_masks_of_drafts_are_found_by_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool, temperature: float
) -> None:
    monkeypatch.setattr(Payoff, "on", lambda *_: True)
    monkeypatch.setattr(FittedStepTime, "learn", lambda *_: None)
    monkeypatch.setitem(choose.PER_TOKEN, "cpu", 0.0)
    monkeypatch.setattr(grammar, "SLOW", 1e9)
    model = write_model(tmp_path / "model")
    with opened(model, overlap=False, speculation="off") as llm:
        plain, steps, _ = run(llm._built.engine, temperature)
    monkeypatch.setattr(cuda_graphs, "_Staging", FakeStaging)
    monkeypatch.setattr(cuda_graphs, "Capture", lambda device: FakeRecorder())
    monkeypatch.setattr(shaping, "allow_only_on_host", shaping.allow_only)  # a loop over rows is not recorded
    with opened(model, overlap=True, speculation="suffix") as llm:
        runner = runner_of(llm)
        behind_the_host(monkeypatch, runner)
        decoding = Graphs(runner.decoder, runner.state, runner.sampler, 17)
        runner.decode_paths = [decoding] if recorded else []
        engine = llm._built.engine
        drafted = [run(engine, temperature) for _ in range(2)]  # the second time the answers are known
        assert engine.speculation is not None
        stats = engine.speculation.stats
        kinds = {kind for (_, traits, kind), one in decoding.recordings._of.items() if one.graph and traits.shaped}
    assert [said for said, _, _ in drafted] == [plain, plain]
    assert drafted[1][2] > 10  # rows without a grammar have drafts in flight beside those with one
    assert stats["grammar"].accepted == stats["grammar"].drafted > 50
    assert stats["suffix"].accepted > 20
    assert drafted[1][1] < steps
    assert not recorded or (kinds & {Kind.DRAFTS, *WIDTHS} and decoding.replays > 10)
