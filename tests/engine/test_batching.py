"""The ways before continuous batching: the same tokens, and exactly the waste that each is known for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Finish, Request
from tokenmill.engine.runner.simulated import Faults, SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.batching import BATCHING
from tokenmill.engine.step import Step
from tokenmill.errors import ConfigError
from tokenmill.kv.manager import KVManager

BLOCK = 8
ASKED = [(5, 3), (20, 9), (13, 1), (30, 6), (8, 12), (17, 4), (9, 7)]  # prompt and answer, in tokens


class House:
    """A simulated engine that keeps what it launched."""

    def __init__(
        self,
        *,
        batching: str = "continuous",
        kv_cache: bool = True,
        rows: int = 3,
        step_tokens: int = 256,
        blocks: int = 64,
        overlap: bool = False,
        faults: Faults | None = None,
        **limits: Any,
    ) -> None:
        self.clock = SimulatedClock()
        self.runner = SimulatedRunner(blocks, BLOCK, self.clock, faults=faults)
        self.batching = BATCHING[batching](kv_cache=kv_cache)
        kv = KVManager(blocks, BLOCK, prefix_caching=self.batching.may_share)
        scheduler = Scheduler(Limits(rows, step_tokens, **limits), kv, batching=self.batching)
        self.engine = Engine(scheduler, self.runner, overlap=overlap, clock=self.clock)
        self.steps: list[Step] = []
        self._launch, self.runner.launch = self.runner.launch, self.launch  # type: ignore[method-assign]

    def launch(self, step: Step) -> Any:
        self.steps.append(step)
        return self._launch(step)

    def run(self, asked: list[tuple[int, int]] = ASKED) -> list[Request]:
        requests = []
        for number, (prompt, answer) in enumerate(asked):
            params = SamplingParams(temperature=0, max_tokens=answer)
            tokens = [(31 * number + 7 * at) % 1000 for at in range(prompt)]
            requests.append(Request(f"r{number}", tokens, params, max_tokens=answer, seed=1, arrival=self.clock.now))
            self.engine.add(requests[-1])
        self.finish()
        return requests

    def finish(self) -> None:
        ends: list[str] = []
        for _ in range(2000):
            if not self.engine.has_work:
                break
            ends += [delta.request.id for delta in self.engine.step() if delta.finished]
        assert len(ends) == len(set(ends)) and not self.engine.has_work
        assert not self.runner.violations
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.kv.pool.num_free == self.engine.scheduler.kv.pool.num_blocks


def outputs(requests: list[Request]) -> list[list[int]]:
    assert all(request.finish is Finish.LENGTH for request in requests)
    return [request.output for request in requests]


SWITCHES: dict[str, dict[str, Any]] = {
    "no cache, one by one": {"kv_cache": False, "rows": 1},
    "no cache, in chunks": {"kv_cache": False, "step_tokens": 16},
    "static": {"batching": "static", "reserved_tokens": 64},
    "static, no cache": {"batching": "static", "kv_cache": False},
    "static, in chunks": {"batching": "static", "step_tokens": 16},
    "dynamic": {"batching": "dynamic", "whole_prompts": True},
    "dynamic, little memory": {"batching": "dynamic", "blocks": 10},
    "whole prompts": {"whole_prompts": True, "step_tokens": 48},
    "whole prompts, little memory": {"whole_prompts": True, "step_tokens": 48, "blocks": 8},
    "reserved": {"reserved_tokens": 64, "blocks": 16},
    "all of it": {
        "batching": "static", "kv_cache": False, "whole_prompts": True, "step_tokens": 64, "reserved_tokens": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_tokens_are_those_of_the_plain_engine(name: str, overlap: bool) -> None:
    expected = outputs(House(rows=1).run())
    assert outputs(House(overlap=overlap, **SWITCHES[name]).run()) == expected


@pytest.mark.parametrize("name", SWITCHES)
def test_steps_that_fail_change_no_tokens(name: str) -> None:
    expected = outputs(House(rows=1).run())
    for seed in range(4):
        house = House(
            overlap=seed % 2 == 1,
            faults=Faults(fail_at_wait=0.1, fail_at_launch=0.05, min_gap=6, seed=seed),
            **SWITCHES[name],
        )
        assert outputs(house.run()) == expected
        assert house.engine.scheduler.stats.failed_steps or len(house.steps) < 60


def test_without_a_cache_every_token_costs_all_tokens_before_it() -> None:
    house = House(kv_cache=False, rows=1)
    house.run([(10, 4)])
    assert [(step.starts, step.counts) for step in house.steps] == [([0], [10]), ([0], [11]), ([0], [12]), ([0], [13])]
    assert house.batching.recomputed == 10 + 11 + 12


def test_a_chunk_that_leaves_one_token_is_not_taken_for_an_answer() -> None:
    house = House(kv_cache=False, rows=1, step_tokens=10)
    house.run([(11, 2)])  # 11 tokens are two chunks of which the second is one token
    assert [(step.starts[0], step.counts[0]) for step in house.steps] == [(0, 10), (10, 1), (0, 10), (10, 2)]


def test_a_static_batch_computes_its_padding_and_ends_as_one() -> None:
    house = House(batching="static", whole_prompts=True)
    first, second, third, fourth = house.run([(6, 2), (20, 5), (14, 3), (9, 1)])
    # the prompts; what two of them lack, each with its next token; then rows of one token, those that are done too
    assert [step.counts for step in house.steps[:2]] == [[6, 20, 14], [6 + 1, 6 + 1]]
    rest = [step for step in house.steps[2:] if fourth not in step.requests]
    assert sum(len(step.rows) for step in rest) > sum([2 - 2, 5 - 1, 3 - 2])
    assert all(len(step.rows) == 3 for step in rest[2:])
    assert house.batching.recomputed >= 6 + 6 + 3
    assert first.metrics.finished == second.metrics.finished == third.metrics.finished
    assert first.metrics.token_times[-1] < second.metrics.token_times[-1]
    assert fourth.metrics.first_scheduled is not None and second.metrics.finished is not None
    assert fourth.metrics.first_scheduled >= second.metrics.finished


def test_nobody_enters_a_dynamic_batch_but_those_who_are_done_leave() -> None:
    house = House(batching="dynamic", whole_prompts=True)
    first, second, third, fourth = house.run([(6, 2), (20, 5), (14, 3), (9, 1)])
    assert house.batching.recomputed == 0
    assert first.metrics.finished < third.metrics.finished < second.metrics.finished  # type: ignore[operator]
    assert fourth.metrics.first_scheduled >= second.metrics.finished  # type: ignore[operator]
    running = House(whole_prompts=True).run([(6, 2), (20, 5), (14, 3), (9, 1)])
    assert running[3].metrics.first_scheduled < running[1].metrics.finished  # type: ignore[operator]


def test_who_comes_late_waits_for_the_next_dynamic_batch() -> None:
    house = House(batching="dynamic")
    params = SamplingParams(temperature=0, max_tokens=20)
    requests = [Request(f"r{n}", [n + 1] * 5, params, max_tokens=20, seed=1) for n in range(2)]
    house.engine.add(requests[0])
    for _ in range(10):
        house.engine.step()
    requests[1].arrival = requests[1].metrics.arrival = house.clock.now
    house.engine.add(requests[1])
    house.finish()
    assert requests[1].metrics.first_scheduled >= requests[0].metrics.finished  # type: ignore[operator]


def test_a_request_that_is_done_can_be_cancelled_while_its_batch_runs() -> None:
    house = House(batching="static")
    params = SamplingParams(temperature=0)
    requests = [Request(f"r{n}", [n + 1] * 5, params, max_tokens=most, seed=1) for n, most in enumerate((1, 30))]
    for request in requests:
        house.engine.add(request)
    for _ in range(5):
        house.engine.step()
    assert requests[0].num_output == 1 and not requests[0].finished
    house.engine.cancel("r0")
    house.finish()
    assert (requests[0].finish, requests[1].finish) == (Finish.CANCELLED, Finish.LENGTH)


def test_whole_prompts_are_never_cut_nor_mixed_with_decodes() -> None:
    house = House(whole_prompts=True, step_tokens=40)
    requests = house.run()
    assert any(len(step.rows) > 1 and step.counts[0] > 1 for step in house.steps)
    for step in house.steps:
        kinds = {start == 0 for start in step.starts}
        assert len(kinds) == 1
        if kinds == {True}:
            assert step.counts == [request.prompt_len for request in step.requests]
    assert len(requests) == len(ASKED)


def test_a_reservation_lets_in_as_many_as_would_fit_at_full_length() -> None:
    def most(**limits: Any) -> int:
        house = House(rows=8, blocks=20, watermark=0.0, **limits)
        house.run()
        return max(len(step.rows) for step in house.steps)

    assert most(reserved_tokens=10 * BLOCK) == 2 and most() > 3


MODES: dict[str, dict[str, Any]] = {
    "bottom": {"kv_cache": False, "max_num_seqs": 1, "enable_chunked_prefill": False},
    "static": {"batching": "static", "kv_reservation": "max_model_len", "enable_chunked_prefill": False},
    "dynamic": {"batching": "dynamic"},
}


def test_the_settings_reach_the_engine_and_keep_its_tokens(tiny_model: str) -> None:
    prompts: list[Any] = [[3 + (7 * at + number) % 100 for at in range(5 + 9 * number)] for number in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=3 + 2 * number, ignore_eos=True) for number in range(6)]

    def answers(**options: Any) -> tuple[list[list[int]], int]:
        fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float64", "device": "cpu"}
        with LLM(tiny_model, max_model_len=128, **fixed | {"max_num_seqs": 4} | options) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
            scheduler = llm._built.engine.scheduler
            return [list(one.outputs[0].token_ids) for one in found], scheduler.batching.recomputed

    expected, again = answers()
    assert again == 0
    for name, options in MODES.items():
        tokens, again = answers(**options)
        assert tokens == expected, name
        assert (again > 0) == (name != "dynamic")


def test_settings_that_cannot_be_are_refused(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens .64. has to be at least max_model_len .128."):
        LLM(
            tiny_model, load_format="dummy", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
            max_num_batched_tokens=64, enable_chunked_prefill=False,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="batching is 'dinamic'; it must be one of continuous, dynamic, static"):
        LLM(tiny_model, batching="dinamic")


def test_a_full_row_of_a_static_batch_waits_for_the_others(tmp_path: Path) -> None:
    """It is computed again and again meanwhile, at the end of its row, and samples behind it."""
    prompts = [{"prompt_token_ids": [5] * 60}, {"prompt_token_ids": [6] * 4}]
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (4, 40)]
    found = []
    for batching in ("continuous", "static"):
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 2}
        with LLM(model=write_tiny(tmp_path / "model"), batching=batching, max_model_len=64, **options) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
            assert llm._built.engine.scheduler.stats.failed_steps == 0
    assert found[0] == found[1]
