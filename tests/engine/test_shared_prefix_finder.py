"""A detected shared prefix is truly common to its members, holds all of them, and reaches attention unchanged."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler, shared
from tokenmill.engine.scheduler.shared import SharedPrefixFinder
from tokenmill.errors import ConfigError
from tokenmill.kv.manager import KVManager

GREEDY = SamplingParams(temperature=0, max_tokens=30)
BLOCK = 8


@pytest.fixture(autouse=True)
def small_groups_count(monkeypatch):
    monkeypatch.setattr(shared, "MIN_ROWS", 2)
    monkeypatch.setattr(shared, "MIN_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(shared, "MIN_SAVED", 1)


def placed(row: int, blocks: list[int]) -> Request:
    request = Request(f"row {row}", [1], GREEDY, max_tokens=30, seed=0)
    request.row, request.blocks = row, blocks
    return request


def check(found, requests, starts):
    """What must hold for whatever was found."""
    prefix = requests[found.members[0]].blocks[: found.tokens // BLOCK]
    assert found.tokens % BLOCK == 0 and len(prefix) * BLOCK == found.tokens
    for index, (request, start) in enumerate(zip(requests, starts, strict=True)):
        fits = request.blocks[: len(prefix)] == prefix and start >= found.tokens
        assert (index in found.members) == fits
    assert list(found.members) == sorted(set(found.members))


def test_the_group_that_saves_most_is_found_in_full_length():
    few = [placed(row, [1, 2, 3, 4, 5, 6, 7, 100 + row]) for row in range(4)]
    many = [placed(row, [1, 2, 200 + row, 300 + row]) for row in range(4, 8)]
    others = [placed(row, [400 + row] * 5) for row in range(8, 12)]
    requests = [one for triple in zip(few, many, others, strict=True) for one in triple]
    starts = [len(request.blocks) * BLOCK - 1 for request in requests]
    found = SharedPrefixFinder(BLOCK).find(requests, starts, admitted=True)
    assert found is not None and found.tokens == 7 * BLOCK  # for 3 rows, rather than 2 blocks for 7
    check(found, requests, starts)


def test_nothing_is_found_where_little_would_be_saved(monkeypatch):
    requests = [placed(row, [1, 2, 3, 100 + row]) for row in range(3)]
    starts = [30] * 3
    assert SharedPrefixFinder(BLOCK).find(requests, starts, admitted=True) is not None
    monkeypatch.setattr(shared, "MIN_SAVED", 2 * 3 * BLOCK + 1)
    assert SharedPrefixFinder(BLOCK).find(requests, starts, admitted=True) is None
    assert SharedPrefixFinder(BLOCK).find([], [], admitted=False) is None


def test_the_same_rows_get_the_same_answer_without_work(monkeypatch):
    requests = [placed(row, [1, 2, 3, 100 + row]) for row in range(4)]
    finder = SharedPrefixFinder(BLOCK)
    first = finder.find(requests, [30] * 4, admitted=True)
    monkeypatch.setattr(finder, "_update", None)
    assert first is not None and finder.find(list(requests), [31] * 4, admitted=False) is first


def test_a_request_that_comes_back_with_other_blocks_is_noticed():
    requests = [placed(row, [1, 2, 3, 100 + row]) for row in range(4)]
    finder = SharedPrefixFinder(BLOCK)
    finder.find(requests, [30] * 4, admitted=True)
    requests[2].blocks = [50, 51, 52, 53]  # preempted, and admitted again in this very step
    found = finder.find(requests, [30] * 4, admitted=True)
    assert found is not None and found.members == (0, 1, 3)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 25))
def test_whatever_is_found_is_common_and_complete(seed, steps):
    """Rows come, go, grow and come back under the same number; prefixes form a tree."""
    chance = random.Random(seed)
    fresh = iter(range(1000, 10**6))
    trunks = [[trunk * 100 + at for at in range(10)] for trunk in range(3)]
    rows: dict[int, Request] = {}
    finder = SharedPrefixFinder(BLOCK)
    for _ in range(steps):
        admitted = False
        for row in range(10):
            if chance.random() < 0.1:
                rows.pop(row, None)
            elif row not in rows and chance.random() < 0.3:
                cut = chance.randint(0, 10)
                rows[row] = placed(
                    row, chance.choice(trunks)[:cut] + [next(fresh) for _ in range(chance.randint(1, 3))]
                )
                admitted = True
            elif row in rows and chance.random() < 0.2:
                rows[row].blocks += [next(fresh)]
        requests = [request for request in rows.values() if chance.random() < 0.9]
        starts = [len(request.blocks) * BLOCK - chance.randint(1, BLOCK) for request in requests]
        found = finder.find(requests, starts, admitted)
        if found is not None:
            check(found, requests, starts)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocks", [60, 400])
def test_steps_stay_true_under_preemption_forks_failures_and_overlap(blocks, overlap):
    """The block tables are rebuilt from the steps alone, as a runner would, and must agree with what is announced."""
    clock = SimulatedClock()
    runner = SimulatedRunner(blocks, BLOCK, clock)
    scheduler = Scheduler(Limits(12, 64), KVManager(blocks, BLOCK), find_shared_prefixes=True)
    house = Engine(scheduler, runner, overlap=overlap, clock=clock)
    tables: dict[int, list[int]] = {}
    announced = []
    launch = runner.launch

    def watched(step):
        for row, first, new in step.blocks:
            tables[row] = tables.get(row, [])[:first] + new
        if step.shared is not None:
            announced.append(len(step.shared.members))
            count = step.shared.tokens // BLOCK
            assert len(step.shared.members) >= 2 and count >= 2
            assert len({tuple(tables[step.rows[member]][:count]) for member in step.shared.members}) == 1
            assert all(member < step.num_singles for member in step.shared.members)
            assert all(step.starts[member] >= step.shared.tokens for member in step.shared.members)
        return launch(step)

    runner.launch = watched
    chance = random.Random(blocks)
    trunk = [(7 * k) % 1000 for k in range(50)]
    for number in range(40):
        prompt = trunk[: chance.randint(1, 50)] + [number] * chance.randint(1, 20)
        request = Request(f"{number}", prompt, GREEDY, max_tokens=chance.randint(1, 40), seed=1)
        if number % 5 == 0:
            request.followers = [
                Request(f"{number}.{k}", prompt, GREEDY, max_tokens=20, seed=k) for k in range(chance.randint(1, 3))
            ]
        house.add(request)
    for number in range(3000):
        if not house.has_work:
            break
        runner.faults.fail_at_wait = float(number in (20, 60))
        house.step()
    assert not house.has_work and not runner.violations
    scheduler.check_integrity()
    assert max(announced) >= 4, "the test above must not pass for want of shared prefixes"
    assert blocks > 60 or scheduler.stats.preemptions


def test_attention_is_told_the_truth_and_tokens_do_not_change(tiny_model):
    """Through the real runner: members' tables on the device agree on the blocks that are said to be shared."""
    with LLM(
        tiny_model, load_format="dummy", skip_tokenizer_init=True, dtype="float64", device="cpu", block_size=BLOCK
    ) as llm:
        engine = llm._processor.engine
        prompts = [[(5 * k) % 100 + 3 for k in range(40)] + [number + 3] * (number + 1) for number in range(6)]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate(prompts[:1], params, use_tqdm=False)
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        ops = engine.runner.decoder.ops
        attend, told = ops.attention, []

        def watched(q, k_cache, v_cache, batch, mask, scale, scales=None):
            if batch.shared_members is not None:
                members = batch.shared_members.long()
                tokens = batch.shared_tokens[members]
                assert (tokens == tokens[0]).all() and batch.shared_tokens.sum() == tokens.sum()
                tables = batch.block_tables[batch.rows[members].long(), : int(tokens[0]) // BLOCK]
                assert (tables == tables[0]).all()
                assert (batch.context[members] > tokens).all() and members.max() < batch.num_singles
                told.append((len(members), int(tokens[0])))
            return attend(q, k_cache, v_cache, batch, mask, scale, scales=scales)

        ops.attention = watched
        engine.scheduler._composer.shared_prefixes = SharedPrefixFinder(BLOCK)
        found = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected
        assert (6, 40) in told


def test_packed_columns_of_recorded_steps_hold_rows_members_and_padding():
    from tokenmill.engine.runner.cuda_graphs import _Columns
    from tokenmill.engine.step import SharedPrefix

    columns = _Columns(scratch_row=9)
    assert columns.rows([4, 2], 4).tolist() == [4, 2, 9, 9]
    assert columns.rows([4, 2], 4) is columns.rows([4, 2], 4)
    assert columns.rows([4, 3], 4).tolist() == [4, 3, 9, 9]
    assert columns.rows([4, 3], 2).tolist() == [4, 3]
    first = SharedPrefix(64, (0, 2))
    assert [column.tolist() for column in columns.shared(first, 4)] == [[0, 2, -1, -1], [64, 0, 64, 0]]
    assert columns.shared(first, 4) is columns.shared(first, 4)
    assert [column.tolist() for column in columns.shared(SharedPrefix(32, (1,)), 2)] == [[1, -1], [0, 32]]


def test_the_switch_is_checked():
    from tokenmill.config import EngineConfig

    assert EngineConfig().shared_prefix_attention
    with pytest.raises(ConfigError, match="shared_prefix_attention"):
        EngineConfig(shared_prefix_attention="yes")
