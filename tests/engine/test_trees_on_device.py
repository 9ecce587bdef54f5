"""Trees that a device drafts: whatever stands in them, at whichever places, answers are those of the plain path."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder
from test_drafts_on_device import OPTIONS, FakeStaging, Unrecorded, behind_the_host, requests, runner_of

sys.path.append(str(Path(__file__).parents[1]))
from tiny import write_tiny

from tokenmill import LLM
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner import cuda_graphs
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.engine.runner.drafters import Verified, VerifiedTrees
from tokenmill.engine.runner.recordings import Kind
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.engine.step import DRAFTED, FANOUT, NODES, ON_DEVICE, ON_TREE, Step, StepResult

TREE_OPTIONS = OPTIONS | {"max_num_seqs": 8 * (1 + NODES)}  # as many tokens as eight rows with trees have


class Planting:
    """Knows how rows go on, and plants that at random places of trees and chains; wrong at a set rate."""

    kind = "planting"
    failure: Exception | None = None

    def __init__(self, state: DeviceState, wrong: float) -> None:
        self._state, self._wrong = state, wrong
        self._random = torch.Generator().manual_seed(2)
        self.answers: dict[int, list[int]] = {}  # by row
        self.grown = 0

    def _next(self, row: int, position: int) -> list[int]:
        known = self.answers.get(row, [])[position + 1 : position + 1 + DRAFTED]
        known += [0] * (DRAFTED - len(known))
        return [
            (one + 1) % 128 if float(torch.rand((), generator=self._random)) < self._wrong else one for one in known
        ]

    def draft(self, verified: Verified) -> None:
        for row, position in zip(verified.rows.tolist(), verified.positions.tolist(), strict=True):
            if row != self._state.scratch_row:
                self._state.drafts[row] = torch.tensor(self._next(row, position))

    def grow(self, verified: VerifiedTrees) -> None:
        for row, position in zip(verified.rows.tolist(), verified.positions.tolist(), strict=True):
            if row == self._state.scratch_row:
                continue
            self.grown += 1
            answer = self._next(row, position)
            tokens = torch.randint(0, 128, (NODES,), generator=self._random)
            parents = torch.randint(0, FANOUT, (NODES,), generator=self._random)
            parents += 1 + (torch.arange(NODES) // FANOUT - 1) * FANOUT
            parents[:FANOUT] = 0
            above = 0
            for depth, token in enumerate(answer):
                node = depth * FANOUT + int(torch.randint(0, FANOUT, (), generator=self._random))
                tokens[node], parents[node] = token, above
                above = node + 1
            self._state.trees.tokens[row], self._state.trees.parents[row] = tokens, parents
            self._state.drafts[row] = torch.tensor(answer)


class Grown(Speculation):
    """Has the device draft trees in every step, whatever that brings. `mixed`: now and then chains, or none."""

    def __init__(self, planting: Planting, answers: dict[str, list[int]], mixed: bool = False) -> None:
        super().__init__(max_tokens=TREE_OPTIONS["max_num_seqs"], per_token=0.0)
        self.planting, self.answers, self.mixed, self.turns = planting, answers, mixed, 0
        self.verified: list[int] = []
        self.trees = self.unsure = 0

    def propose(self, requests: Sequence[Request]) -> None:
        self.turns += 1
        how = self.turns % 7 if self.mixed else 0
        self.drafting, self.tree = how != 3, how not in (3, 5)
        newest = dict(self._drafting_steps)
        for one in requests:
            self.unsure += one.unsure
            self.planting.answers[one.row] = one.tokens[: one.prompt_len] + self.answers[one.id]
            if self.drafting and one.last_step in newest:
                kind = ON_TREE if self.tree and newest[one.last_step] else ON_DEVICE
                one.drafts = [kind] * (one.unsure + DRAFTED)

    def committed(self, step: Step, result: StepResult, seconds: float) -> None:
        for row, samples, tokens in zip(step.rows, step.samples, result.tokens):
            if step.tree and samples == 1 + DRAFTED and step.drafts[row][-1] == ON_TREE:
                self.trees += 1
                self.verified.append(len(tokens))


def answered(engine: Engine, proposer: Speculation | None, penalty: float = 1.0, **changes: Any) -> dict[str, Any]:
    some, engine.speculation = requests(penalty), proposer
    for one in some:
        one.params = replace(one.params, **changes)
    late, steps = some[3:], 0
    for one in some[:3]:
        engine.add(one)
    said: dict[str, Any] = {one.id: [] for one in some}
    while engine.has_work or late:
        if steps == 6:
            for one in late:
                engine.add(one)
            late = []
        for delta in engine.step():
            said[delta.request.id] += [(one.token, one.logprob) for one in delta.logprobs] or delta.tokens
        steps += 1
        if steps == 9 and proposer is not None:
            engine.scheduler.life.preempt(engine.scheduler.running[-1])
    assert engine.scheduler.stats.failed_steps == 0
    assert proposer is None or engine.speculation is proposer
    engine.scheduler.check_integrity()
    return said


def with_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float, overlap: bool = True, mixed: bool = False,
    penalty: float = 1.0, **changes: Any,
) -> tuple[dict[str, Any], dict[str, Any], Grown, DecodeGraphs]:  # fmt: skip
    model = write_tiny(tmp_path / "model")
    with LLM(model=model, overlap=False, **TREE_OPTIONS) as llm:
        plain = answered(llm._built.engine, None, penalty, **changes)
    monkeypatch.setattr(cuda_graphs, "_Staging", FakeStaging)
    monkeypatch.setattr(cuda_graphs, "Capture", lambda device: FakeRecorder())
    with LLM(model=model, overlap=overlap, **TREE_OPTIONS) as llm:
        runner = runner_of(llm)
        behind_the_host(monkeypatch, runner)
        decoding = Unrecorded(runner.decoder, runner.state, runner.sampler, TREE_OPTIONS["max_num_seqs"])
        decoding.drafter = decoding.tree_drafter = Planting(runner.state, wrong)
        runner.decode_paths = [decoding]
        answers = {name: [one[0] if isinstance(one, tuple) else one for one in said] for name, said in plain.items()}
        grown = Grown(decoding.drafter, answers, mixed)
        drafted = answered(llm._built.engine, grown, penalty, **changes)
    return plain, drafted, grown, decoding


@pytest.mark.parametrize("mixed", [False, True], ids=["trees", "mixed"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_trees_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float, overlap: bool, mixed: bool
) -> None:
    """Greedy rows and seeded ones, one of which is preempted on the way."""
    plain, drafted, grown, decoding = with_trees(tmp_path, monkeypatch, wrong, overlap, mixed)
    assert drafted == plain
    assert decoding.steps_of[Kind.TREES] > 5 and grown.trees > (5 if mixed else 10)
    assert (grown.unsure > 0) == overlap
    held = sum(grown.verified) / len(grown.verified)
    assert held < 1.2 if wrong == 1.0 else held > (1.5 if wrong else 4.0)
    assert not mixed or decoding.steps_of[Kind.TREES] < sum(decoding.steps_of.values()) - 2


def test_log_probabilities_stay_with_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafted, grown, decoding = with_trees(tmp_path, monkeypatch, 0.3, logprobs=8)
    assert decoding.steps_of[Kind.TREES] > 5 and max(grown.verified) > 2
    for name, tokens in plain.items():
        assert [token for token, _ in drafted[name]] == [token for token, _ in tokens]
        assert [value for _, value in drafted[name]] == pytest.approx([value for _, value in tokens], abs=1e-4)


def test_rows_whose_logits_depend_on_their_history_verify_chains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted, _, decoding = with_trees(tmp_path, monkeypatch, 0.0, penalty=1.2)
    assert drafted == plain
    assert decoding.steps_of[Kind.TREES] < 10 and decoding.steps_of[Kind.CHAINS_OF_5] > 3
