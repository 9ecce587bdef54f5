"""Slots for adapters: those who wait get one in their turn, those who run keep theirs, and nobody waits for ever."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_folders import merged, write_adapter, write_base

from tokenmill import LLM, SamplingParams
from tokenmill.engine.adapters import NO_SLOT, PATIENCE, AdapterPool
from tokenmill.engine.request import BATCH, REALTIME, Request
from tokenmill.errors import InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "max_model_len": 64}


class Shelf:
    """Adapters come from it as told, and into slots."""

    def __init__(self, slots: int, slow: bool = False) -> None:
        self.slots: list[str | None] = [None] * slots
        self.slow, self.read, self.news = slow, set[str](), list[tuple[str, str | None]]()
        self.busy = False

    def bring(self, key: str) -> bool:
        return not self.slow or key in self.read

    def arrived(self) -> list[tuple[str, str | None]]:
        news, self.news = self.news, []
        return news

    def place(self, key: str, slot: int) -> None:
        self.slots[slot] = key

    def drop(self, key: str) -> None: ...

    def wait(self, seconds: float) -> None: ...


def pool_of(slots: int, adapters: int, **how: Any) -> tuple[AdapterPool, Shelf]:
    shelf = Shelf(slots, **how)
    pool = AdapterPool(slots, shelf)
    for number in range(adapters):
        pool.register(f"a{number}", f"k{number}")
    return pool, shelf


def request(pool: AdapterPool, adapter: int, arrival: float, priority: int = BATCH) -> Request:
    one = Request(f"r{arrival}", [1], GREEDY, max_tokens=1, seed=0, arrival=arrival, priority=priority)
    one.adapter_key = f"k{adapter}"
    pool.enter(one)
    if not pool.acquire(one):
        pool.ask(one, None)
    return one


def granted(pool: AdapterPool, now: float = 0.0) -> list[Request]:
    return [one for one, _ in pool.turn(now)[0]]


def test_newcomers_do_not_keep_a_slot_from_one_who_waited_before_them() -> None:
    pool, shelf = pool_of(1, 2)
    first = request(pool, 0, 1.0)
    assert granted(pool) == [first]
    waiting = request(pool, 1, 2.0)
    assert granted(pool) == []
    late = request(pool, 0, 3.0)  # of the adapter that is there
    assert granted(pool) == [] and pool.num_waiting == 2
    pool.release(first)
    assert granted(pool) == [waiting] and shelf.slots == ["k1"]
    pool.release(waiting)
    assert granted(pool) == [late] and pool.stats.evictions == 2


def test_important_requests_go_first_but_not_for_ever() -> None:
    pool, _ = pool_of(1, 3)
    running = request(pool, 0, 1.0)
    assert granted(pool) == [running]
    batch, urgent = request(pool, 1, 2.0), request(pool, 2, 3.0, REALTIME)
    pool.release(running)
    assert granted(pool) == [urgent]
    request(pool, 0, 4.0, REALTIME)
    pool.release(urgent)
    assert granted(pool, now=2.5 + PATIENCE) == [batch]


def test_the_least_recently_used_of_free_slots_goes() -> None:
    pool, shelf = pool_of(2, 3)
    for adapter in (0, 1, 0):
        one = request(pool, adapter, float(adapter))
        granted(pool)
        pool.release(one)
    request(pool, 2, 9.0)
    assert len(granted(pool)) == 1 and shelf.slots == ["k0", "k2"]


def test_one_that_cannot_be_read_fails_those_who_wait_for_it_alone() -> None:
    pool, shelf = pool_of(2, 2, slow=True)
    lost, other = request(pool, 0, 1.0), request(pool, 1, 2.0)
    assert pool.turn(0.0) == ([], [])
    shelf.read.add("k1")
    shelf.news = [("k0", "it is gone"), ("k1", None)]
    said, failed = pool.turn(0.0)
    assert [one for one, _ in said] == [other] and failed == [(lost, "it is gone")]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.randoms(use_true_random=False), st.booleans())
def test_everybody_gets_a_slot_and_no_slot_in_use_is_replaced(
    slots: int, adapters: int, chance: random.Random, slow: bool
) -> None:
    pool, shelf = pool_of(slots, adapters, slow=slow)
    running: list[Request] = []
    waiting: list[Request] = []
    alive: dict[str, Request] = {}
    for number in range(200):
        coming = number < 120
        if coming and chance.random() < 0.6:
            one = request(pool, chance.randrange(adapters), float(number), chance.randrange(3))
            alive[one.id] = one
            (running if one.slot != NO_SLOT else waiting).append(one)
        if waiting and chance.random() < 0.1:
            pool.release(gone := waiting.pop(chance.randrange(len(waiting))))
            del alive[gone.id]
        if running and chance.random() < 0.5:
            pool.release(ended := running.pop(chance.randrange(len(running))))
            del alive[ended.id]
        if chance.random() < 0.05:  # the device lost them all
            shelf.slots = [None] * slots
            for one in pool.lose():
                running.remove(one)
                waiting.append(one)
                assert not pool.acquire(one)
                pool.ask(one, None)
            assert not running
        shelf.read = {f"k{chance.randrange(adapters)}" for _ in range(2)}
        for one in granted(pool, float(number)):
            waiting.remove(one)
            running.append(one)
        pool.check_integrity(alive)
        for one in running:
            assert shelf.slots[one.slot] == one.adapter_key
    for _ in range(20 * adapters):
        for one in running:
            pool.release(one)
            del alive[one.id]
        shelf.read = {f"k{number}" for number in range(adapters)}
        running = granted(pool, 1e6)
        waiting = [one for one in waiting if one not in running]
    assert not waiting and not pool.has_waiting


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("pool") / "base")


def test_a_thousand_adapters_are_served_with_few_slots_and_little_memory(base: Path, tmp_path: Path) -> None:
    number, room = 1000, 20_000
    few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    how: dict[str, Any] = {"rank": 1, "alpha": 1, "size": 2.0}
    folders = [
        write_adapter(tmp_path / f"a{seed}", seed=seed, targets=("mlp.down_proj", "self_attn.q_proj"), **how)
        for seed in range(number)
    ]
    with LLM(str(base), enable_lora=True, max_loras=4, max_lora_rank=1, lora_host_memory=room, **OPTIONS) as llm:
        for index, folder in enumerate(folders):
            llm.load_adapter(f"a{index}", folder)
        store, pool = llm._built.engine.adapters, llm._built.engine.scheduler.life.adapters
        assert store is not None and pool is not None and store.host_used <= room
        prompts = [[3, 4, 5, 6 + index % 50] for index in range(number)]
        states = [llm._processor.prepare(p, few, adapter=f"a{i}") for i, p in enumerate(prompts)]
        outputs = [one.output() for one in llm._run(states, False)]
        assert store.host_used <= room and pool.num_resident == 4
        assert [one.outputs[0].finish_reason for one in outputs] == ["length"] * number
        assert pool.stats.loads >= number and pool.stats.evictions >= number - 4
        llm._built.engine.scheduler.check_integrity()
    for index in (0, 500, 999):
        with LLM(str(merged(base, folders[index], tmp_path / f"m{index}", 1.0)), **OPTIONS) as alone:
            (said,) = alone.generate([prompts[index]], few, False)
            assert said.outputs[0].token_ids == outputs[index].outputs[0].token_ids


def test_an_adapter_that_changed_on_disk_fails_its_requests_alone(base: Path, tmp_path: Path) -> None:
    one, other = (write_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    with LLM(str(base), enable_lora=True, max_loras=1, lora_host_memory=20_000, **OPTIONS) as llm:
        llm.load_adapter("one", one)
        llm.load_adapter("other", other)  # there is no room for both
        write_adapter(one, seed=3)
        (said,) = llm.generate([[3, 4]], GREEDY, False, adapter="one")
        assert said.outputs[0].finish_reason == "error" and "has changed since it was loaded" in str(said.error)
        (said,) = llm.generate([[3, 4]], GREEDY, False, adapter="other")
        assert said.outputs[0].finish_reason == "length"


def test_who_waits_for_a_slot_may_leave_and_the_others_go_on(base: Path, tmp_path: Path) -> None:
    with LLM(str(base), enable_lora=True, max_loras=1, **OPTIONS) as llm:
        for seed in range(3):
            llm.load_adapter(f"a{seed}", write_adapter(tmp_path / str(seed), seed=seed))
        streams = [llm.stream([3, 4, 5], GREEDY, adapter=f"a{seed}") for seed in range(3)]
        next(streams[0])
        submitted = [llm._processor.prepare([3, 4, 5], GREEDY, adapter=f"a{seed}") for seed in (1, 2)]
        for state in submitted:
            llm._processor.submit(state)
        llm._step()
        assert [str(state.leader.waits_for) for state in submitted] == ["Wait.ADAPTER"] * 2
        llm._processor.cancel(submitted[0])
        assert len(list(streams[0])) > 0
        while not submitted[1].finished:
            llm._step()
        assert submitted[1].output().outputs[0].finish_reason == "length"
        llm._built.engine.scheduler.check_integrity()


def test_whoever_names_none_hears_of_no_other() -> None:
    pool, _ = pool_of(1, 2)
    with pytest.raises(InvalidRequest, match=r"there is no adapter 'b'$"):
        pool.key_of("b")
