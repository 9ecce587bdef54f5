"""Trees of the default model's own head hold for longer than its chains, and change nothing either."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from test_drafts_on_device import FakeStaging, Unrecorded, behind_the_host, runner_of

from tokenmill import LLM, SamplingParams
from tokenmill.engine.request import Request
from tokenmill.engine.runner import cuda_graphs
from tokenmill.engine.runner.recordings import Kind
from tokenmill.engine.speculation.head import DeviceHead
from tokenmill.engine.speculation.head_runner import HeadRunner
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.engine.step import DRAFTED, NODES, ON_DEVICE, ON_TREE, Step, StepResult
from tokenmill.model.draft_head import shipped_head

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("What is the capital of France, and why?", "Write a short story about a dog.")
]
ROWS = 2 * (1 + NODES)  # as many tokens as two rows with trees have


class Drafting(Speculation):
    """Has every step verify what the device drafted."""

    def __init__(self, trees: bool) -> None:
        super().__init__(max_tokens=ROWS, per_token=0.0)
        self.drafting, self.tree = True, trees
        self.steps = self.tokens = 0

    def propose(self, requests: Sequence[Request]) -> None:
        newest = dict(self._drafting_steps)
        for one in requests:
            if one.last_step in newest:
                one.drafts = [ON_TREE if newest[one.last_step] else ON_DEVICE] * (one.unsure + DRAFTED)

    def committed(self, step: Step, result: StepResult, seconds: float) -> None:
        for samples, tokens in zip(step.samples, result.tokens):
            if samples > DRAFTED:
                self.steps += 1
                self.tokens += len(tokens)


def test_trees_hold_for_longer_than_chains(default_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a greedy answer and of one that is drafted with the noise that it is sampled with."""
    params = [SamplingParams(temperature=heat, seed=3, max_tokens=48, ignore_eos=True) for heat in (0.0, 1.0)]
    monkeypatch.setattr(cuda_graphs, "_Staging", FakeStaging)
    monkeypatch.setattr(cuda_graphs, "Capture", lambda device: None)
    options = {"device": "cpu", "ops": "reference", "cuda_graphs": False, "max_num_seqs": ROWS, "max_model_len": 96}
    answers, held = [], []
    with LLM(default_model, speculation="off", overlap=True, **options) as llm:
        engine, runner = llm._built.engine, runner_of(llm)
        answers.append([one.outputs[0].token_ids for one in llm.chat(CHATS, params, use_tqdm=False)])
        behind_the_host(monkeypatch, runner)
        graphs = Unrecorded(runner.decoder, runner.state, runner.sampler, ROWS)
        shipped = shipped_head(runner.decoder.spec, runner.decoder.weights.final_norm)
        assert shipped is not None
        ready = HeadRunner(shipped, runner.decoder, runner.sampler, False, runner.state.kv)
        graphs.drafter = graphs.tree_drafter = DeviceHead(ready, runner.state, ROWS + 1)
        runner.decode_paths = [graphs]
        for trees in (False, True):
            engine.speculation = speculation = Drafting(trees)
            llm.reset_prefix_cache()
            answers.append([one.outputs[0].token_ids for one in llm.chat(CHATS, params, use_tqdm=False)])
            held.append(speculation.tokens / speculation.steps)
    assert answers[0] == answers[1] == answers[2]
    assert graphs.steps_of[Kind.TREES] > 5 and graphs.steps_of[Kind.CHAINS_OF_5] > 5
    assert held[1] > 1.05 * held[0], held
