"""Ended requests leave keys and values for others to continue, beside everything else that happens: same tokens, and
nothing leaks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from harness import Day, House
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sim_clients import CALM, POISON, ROUGH, STOP_IDS, Client, clients
from sim_tier import Troubles
from test_sim_tiers import TieredDay, forget_on_the_device, with_tiers

from tokenmill.engine.core import Engine
from tokenmill.engine.request import API, BATCH, REALTIME, Finish, Request
from tokenmill.engine.runner.simulated import Faults
from tokenmill.engine.scheduler import Delta
from tokenmill.params import SamplingParams


@dataclass
class HeldDay(Day):
    """Whoever kept what it came to is continued, by none or by several, and dropped some day."""

    links: int = 150  # continuations, at most
    forget: float = 0.0  # probability per step that the prefix cache is reset
    continued: int = 0
    spared: int = 0  # that did not compute all of their prompt
    _asked: int = 0
    _ready: list[Request] = field(default_factory=list)

    def step(self) -> list[Delta]:
        deltas = super().step()
        ends = [delta.request for delta in deltas if delta.finished and delta.request.beams is None]
        self._ready += [one for one in ends if one.finish in (Finish.STOP, Finish.LENGTH) and one.pooling is None]
        self.spared += sum(one.continues is not None and one.metrics.cached_tokens > 0 for one in ends)
        if self._ready and self.rng.random() < 0.7:
            self._continue(self._ready.pop(self.rng.randrange(len(self._ready))))
        held = self.scheduler.life.held
        if self.rng.random() < 0.1:
            for id in [one.id for one in held if self.rng.random() < 0.3]:
                self.engine.drop_held(id)
        if self.rng.random() < self.forget:
            self.engine.reset_prefix_cache(self.rng.choice([None, "tenant-0", "tenant-1"]))
        assert held.num_blocks == sum(len(one.blocks) for one in held)
        return deltas

    def _continue(self, before: Request) -> None:
        """One follows it, or some: behind all of its tokens, or only some of them."""
        for _ in range(self.rng.choice([1, 1, 1, 2, 5])):
            if self.continued == self.links:
                return
            cut = len(before.tokens) if self.rng.random() < 0.8 else self.rng.randrange(1, len(before.tokens) + 1)
            more = [self.rng.randrange(400) for _ in range(self.rng.randrange(1, 30))]
            prompt = [*before.tokens[:cut], *more][-230:]
            scores = self.rng.random() < 0.2
            output = self.rng.randrange(1, 16)
            params = SamplingParams(
                temperature=self.rng.choice([0.0, 1.0]),
                max_tokens=output,
                prompt_logprobs=0 if scores else None,
                prompt_logprobs_start=self.rng.randrange(len(prompt)) if scores else 0,
            )
            self.continued += 1
            request = Request(
                f"{before.id.split('/')[0]}+{self.continued}/0",
                prompt,
                params,
                max_tokens=output,
                seed=self.rng.getrandbits(63),
                stop_ids=STOP_IDS if self.rng.random() < 0.5 else frozenset(),
                priority=self.rng.choice([REALTIME, API, BATCH]),
                arrival=self.clock.now,
                salt=before.salt if self.rng.random() < 0.9 else "tenant-9",
                keep=self.rng.random() < 0.8,
                continues=before.id,
            )
            vanish = self.rng.randrange(1, 9) if self.rng.random() < 0.1 else None
            self._ask(Client(self.clock.now, [request], vanish))

    def _check_idle(self) -> None:
        held = self.scheduler.life.held
        self.scheduler.check_integrity()
        for one in list(held):
            self.engine.drop_held(one.id)
        assert held.num_blocks == 0 == len(held)
        super()._check_idle()


class HeldTieredDay(HeldDay, TieredDay):
    """And with blocks that move between the device and tiers."""


def crowd(seed: int, count: int, rough: bool) -> list[Client]:
    rng, found = random.Random(seed), list(clients(seed, count, ROUGH if rough else CALM))
    for client in found:
        client.requests[0].keep = not client.requests[0].followers and rng.random() < 0.6
    return found


def faults_of(seed: int, lost: float = 0.0) -> Faults:
    return Faults(
        fail_at_launch=0.01, fail_at_wait=0.02, lose_memory=lost, min_gap=10, poisoned_tokens=POISON, seed=seed
    )


def ask(engine: Engine, id: str, prompt: list[int], continues: str | None = None, keep: bool = False) -> Request:
    params = SamplingParams(temperature=0)
    request = Request(id, prompt, params, max_tokens=1, seed=0, keep=keep, continues=continues)
    engine.add(request)
    while not request.finished:
        engine.step()
        engine.scheduler.check_integrity()
    return request


@pytest.mark.parametrize("overlap", [True, False])
def test_who_continues_what_fills_memory_gets_it_if_nobody_else_can_give_any(overlap: bool) -> None:
    engine = House(2, 64, blocks=10, block_size=8, overlap=overlap, prefix_caching=False, held_share=1.0).build()
    ask(engine, "first", list(range(60)), keep=True)
    assert engine.scheduler.life.held.num_blocks == 8
    second = ask(engine, "second", list(range(79)), "first")  # 7 blocks are shared, but the last one is to be copied
    assert second.finish is Finish.LENGTH and engine.scheduler.life.held.given_up == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_given_up_may_be_what_a_newcomer_starts_on(overlap: bool) -> None:
    engine = House(2, 64, blocks=10, block_size=8, overlap=overlap, held_share=1.0).build()
    ask(engine, "first", list(range(40)), keep=True)
    ask(engine, "second", list(range(100, 124)), keep=True)
    third = ask(engine, "third", list(range(79)))  # starts on five blocks, lacks five, and two are free
    assert third.finish is Finish.LENGTH and engine.scheduler.life.held.given_up == 2


def test_who_can_continue_reads_nothing_from_a_tier() -> None:
    engine, (tier,) = with_tiers(House(2, 64, blocks=40, block_size=8), [(100, Troubles(seconds=1e-4))])
    ask(engine, "first", list(range(60)), keep=True)
    while engine.scheduler.kv.transfers.under_way:
        engine.clock.wait_until(engine.clock.now + 1)
        engine.scheduler.take_in_transfers()
    forget_on_the_device(engine.scheduler.kv)
    params = SamplingParams(temperature=0)
    second = Request("second", list(range(64)), params, max_tokens=1, seed=0, continues="first")
    engine.add(second)
    assert tier.store and not engine.scheduler.gate.fetch(second, 40) and not engine.scheduler.kv.transfers.under_way
    while not second.finished:
        engine.step()
    assert second.metrics.cached_tokens == 60 and not tier.events["read"]


ANY = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a day shrinks to nothing smaller that fails, for minutes
)


@settings(ANY, max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.sampled_from([45, 70, 200]),
    share=st.sampled_from([0.2, 0.5, 1.0]),
    overlap=st.booleans(),
    caching=st.booleans(),
    stages=st.sampled_from([1, 1, 2, 4]),
    rough=st.booleans(),
    lost=st.sampled_from([0.0, 0.05]),
)
def test_who_continues_says_what_it_says_alone(
    seed: int, blocks: int, share: float, overlap: bool, caching: bool, stages: int, rough: bool, lost: float
) -> None:
    house = House(
        rows=12, step_tokens=64, blocks=blocks, block_size=8, overlap=overlap, prefix_caching=caching, stages=stages,
        held_share=share, watermark=0.02,
    )  # fmt: skip
    drafts = 0.3 if rough and stages == 1 else 0.0
    day = HeldDay(
        house.build(faults_of(seed, lost) if rough else None),
        seed=seed, drafts=drafts, storm=0.002 if rough else 0.0, integrity=0.3, forget=0.01,
    )  # fmt: skip
    day.run(crowd(seed, 50, rough))


@settings(ANY, max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.sampled_from([45, 70, 200]),
    share=st.sampled_from([0.5, 1.0]),
    overlap=st.booleans(),
    rough=st.booleans(),
    room=st.sampled_from([10, 100, 10_000]),
    slow=st.sampled_from([0.0, 1e-3, 3e-2]),
)
def test_who_continues_beside_tiers_says_what_it_says_alone(
    seed: int, blocks: int, share: float, overlap: bool, rough: bool, room: int, slow: float
) -> None:
    house = House(
        rows=12, step_tokens=64, blocks=blocks, block_size=8, overlap=overlap, held_share=share, watermark=0.02
    )
    troubles = Troubles(fail=0.1, torn=0.1, stuck=0.01, seconds=slow) if rough else Troubles(seconds=slow)
    engine, _ = with_tiers(house, [(room, troubles)], faults_of(seed) if rough else None, seed=seed)
    day = HeldTieredDay(
        engine, seed=seed, drafts=0.2 if rough else 0.0, storm=0.002 if rough else 0.0, integrity=0.3, forget=0.005
    )
    day.run(crowd(seed, 50, rough))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_long_faulty_day_of_continuations(seed: int) -> None:
    house = House(rows=12, step_tokens=64, blocks=60, block_size=8, overlap=seed % 3 != 0, held_share=1.0)
    troubles = Troubles(fail=0.05, torn=0.05, slow=0.05, stuck=0.001, seconds=3e-3)
    engine, _ = with_tiers(house, [(300, troubles)], faults_of(seed), seed=seed)
    day = HeldTieredDay(engine, seed=seed, drafts=0.2, storm=0.001, integrity=0.05, forget=0.001, links=1500)
    day.run(crowd(seed, 1000, True))
    assert day.spared > 100 and engine.scheduler.life.held.given_up > 10
