"""Prompts with modules beside everything else that happens: everybody has an end, nothing leaks, and whoever marks
nothing gets the very answer that it would get alone, whatever was copied into others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from harness import Day, House
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sim_answer import Answer
from sim_clients import CALM, POISON, ROUGH, Client, clients

from tokenmill.engine.request import Finish, Module, Request
from tokenmill.engine.runner.simulated import Faults
from tokenmill.engine.scheduler import Delta
from tokenmill.engine.scheduler.modules import LEAST_COPIED, ModuleRules

REREAD = 3
RULES = ModuleRules(lambda: list(range(600, 613)), REREAD)
LIBRARY = [[(31 * n + 7 * k * k) % 399 for k in range(LEAST_COPIED + 4 + 5 * n)] for n in range(5)]


@dataclass
class ModuleDay(Day):
    """Some of those who come have modules in their prompts."""

    forget: float = 0.0  # probability per step that the prefix cache is reset
    marked: set[str] = field(default_factory=set)
    placed: int = 0  # tokens, in steps that were launched
    waited: int = 0  # steps in which somebody waited for modules

    def step(self) -> list[Delta]:
        deltas = super().step()
        assert not any(delta.request.is_module for delta in deltas)
        self.waited += any(one.waits_for is not None and one.modules for one in self.scheduler.life.parked.values())
        if self.rng.random() < self.forget:
            self.engine.reset_prefix_cache(self.rng.choice([None, "tenant-0", "tenant-1"]))
        return deltas

    def _ask(self, client: Client) -> bool:
        self.marked |= {request.id for request in client.requests if request.modules}
        return super()._ask(client)

    def _judge_one(self, request: Request, answer: Answer, heard: tuple[int, ...]) -> None:
        """What a module gives is not what reading gives, so an answer may be another one; it is whole all the same."""
        if request.id not in self.marked:
            super()._judge_one(request, answer, heard)
            return
        self.placed += request.metrics.module_tokens
        assert request.finish is not None and not request.in_flight and not request.pending
        assert request.beams is not None or heard == tuple(request.output)
        if request.finish is Finish.LENGTH and request.beams is None:
            assert request.num_output == request.max_tokens

    def _check_idle(self) -> None:
        modules = self.scheduler.modules
        assert modules is not None and not modules._coming and not modules._places
        super()._check_idle()


def with_modules(crowd: Iterable[Client], seed: int, share: float = 0.6) -> Iterator[Client]:
    rng = random.Random(seed)
    for client in crowd:
        if rng.random() < share:
            before, documents = [5] * rng.choice([0, 9]), rng.sample(LIBRARY, rng.randrange(1, 3))
            marked = rng.random() < 0.7  # others have the same text without marks: they find nothing that was copied
            for request in client.requests:
                fill(request, before, documents, marked)
        yield client


def fill(request: Request, before: list[int], documents: list[list[int]], marked: bool) -> None:
    """Put documents before a prompt, perhaps as modules."""
    prompt = list(before)
    for one in documents:
        if marked:
            request.modules.append(Module(len(prompt), len(prompt) + len(one)))
        prompt = prompt + one
    request.tokens = prompt + request.tokens
    request.prompt_len = len(request.tokens)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_day_with_modules_is_like_any_other_for_those_who_have_none(overlap: bool) -> None:
    day = ModuleDay(House(overlap=overlap, modules=RULES).build(), seed=1, drafts=0.3, integrity=0.05)
    day.run(with_modules(clients(1, 150), 1))
    assert len(day.marked) > 60 and day.placed > 60 * LEAST_COPIED and day.waited


@pytest.mark.parametrize("seed", [1, 2])
def test_so_is_one_with_faults_floods_and_too_little_memory(seed: int) -> None:
    faults = Faults(fail_at_launch=0.02, fail_at_wait=0.02, lose_memory=0.003, poisoned_tokens=POISON, seed=seed)
    house = House(rows=8, step_tokens=48, blocks=70, modules=RULES, eviction=("lru", "cost")[seed - 1])
    day = ModuleDay(house.build(faults), seed=seed, drafts=0.2, storm=0.01, integrity=0.2, forget=0.02)
    day.run(with_modules(clients(seed, 120, ROUGH), seed))
    assert day.placed > 0 and day.scheduler.stats.preemptions and day.scheduler.stats.failed_steps


def test_stages_of_a_pipeline_place_them_too() -> None:
    day = ModuleDay(House(stages=3, modules=RULES).build(), seed=4, integrity=0.05)
    day.run(with_modules(clients(4, 80), 4))
    assert day.placed > 20 * LEAST_COPIED


@settings(
    deadline=None,
    max_examples=12,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 9),
    blocks=st.integers(48, 150),
    step_tokens=st.integers(9, 90),
    overlap=st.booleans(),
    share=st.floats(0.1, 1.0),
    fail=st.sampled_from([0.0, 0.05]),
)
def test_any_small_house_comes_through_any_day(
    seed: int, rows: int, blocks: int, step_tokens: int, overlap: bool, share: float, fail: float
) -> None:
    house = House(rows=rows, step_tokens=step_tokens, blocks=blocks, overlap=overlap, modules=RULES)
    faults = Faults(fail_at_launch=fail, fail_at_wait=fail, seed=seed)
    day = ModuleDay(house.build(faults), seed=seed, drafts=0.2, storm=0.01, integrity=0.3, forget=0.03)
    day.run(with_modules(clients(seed, 25, CALM), seed, share))
