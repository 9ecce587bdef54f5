"""A real engine whose memory is far too small, with tiers: the tokens are those of one that has plenty."""

import os
import random

import pytest
import torch
from fake_memory import BadFiles
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.block_memory import ArenaMemory
from tokenmill.errors import ConfigError

BLOCK = 2 * 2 * 2 * 16 * 8  # elements of a block of 16 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def open_llm(model, blocks, **options):
    itemsize = {"float16": 2, "int8": 1.25, "auto": 4, "float32": 4}[options.get("kv_cache_dtype", "auto")]
    return LLM(
        model, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=4, max_model_len=256,
        kv_cache_memory=int(blocks * BLOCK * itemsize), speculation="off", **options,
    )  # fmt: skip


def conversations(llm, users=8, turns=3, output=20):
    """Everybody talks in turn: when somebody speaks again, the others have filled the memory."""
    rng = random.Random(1)
    texts = [[rng.randrange(3, 128) for _ in range(50)] for _ in range(users)]
    said = []
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for _ in range(turns):
        for user, one in enumerate(llm.generate([{"prompt_token_ids": text} for text in texts], params)):
            tokens = list(one.outputs[0].token_ids)
            said.append(tokens)
            texts[user] += tokens + [rng.randrange(3, 128) for _ in range(10)]
        settle(llm._built.engine.scheduler)
    return said


def settle(scheduler):
    """Let copies end, so that how busy this machine is does not decide what is held."""
    transfers = scheduler.kv.transfers
    while transfers is not None and transfers.under_way:
        transfers.wait(0.01)
        scheduler.take_in_transfers()


def engine_of(llm):
    """Its time model is not asked: which of two ways is faster on a busy machine is no matter here."""
    engine = llm._built.engine
    engine.scheduler.kv.transfers.learn = lambda step, seconds: None
    return engine


@pytest.fixture(scope="module")
def expected(model):
    said = {}
    for dtype in ("auto", "float16", "int8"):
        with open_llm(model, 400, kv_cache_dtype=dtype) as llm:
            said[dtype] = conversations(llm)
    return said


@pytest.mark.parametrize("ops", [None, "reference"])
@pytest.mark.parametrize("dtype", ["auto", "float16", "int8"])
def test_host_memory_holds_what_the_device_cannot(model, expected, dtype, ops):
    with open_llm(model, 40, kv_cache_dtype=dtype, kv_host_memory=4 << 20, ops=ops) as llm:
        engine = engine_of(llm)
        said = conversations(llm)
        stats = engine.scheduler.kv.transfers.tiers[0].stats
        engine.scheduler.check_integrity()
        assert any("kv in host" in line for line in llm.plan_lines())
    assert said == expected[dtype]
    assert stats.read > 20 and stats.written > 40 and not stats.failed, stats


def test_preempted_requests_come_back_from_host_memory_with_the_same_tokens(model):
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 128) for _ in range(60)]} for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    said = []
    for blocks, options in ((400, {}), (20, {"kv_host_memory": 4 << 20})):
        with open_llm(model, blocks, **options) as llm:
            scheduler = llm._built.engine.scheduler
            if options:
                engine_of(llm)
            said.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)])
            scheduler.check_integrity()
    assert said[0] == said[1]
    assert scheduler.stats.preemptions > 2 and scheduler.kv.transfers.swapped > 0


def test_a_disk_serves_the_next_engine(model, expected, tmp_path):
    options = {"kv_host_memory": 1 << 20, "kv_disk_path": str(tmp_path), "kv_disk_bytes": 8 << 20}
    for start in range(2):
        with open_llm(model, 40, **options) as llm:
            engine = engine_of(llm)
            disk = engine.scheduler.kv.transfers.tiers[1]
            assert disk.transport.wait_until_scanned(20)
            assert conversations(llm) == expected["auto"]
            assert bool(disk.stats.read) or not start, "the second engine found nothing"
            engine.scheduler.check_integrity()


def test_another_models_folder_is_never_read(model, expected, tmp_path, tmp_path_factory):
    other = write_tiny(tmp_path_factory.mktemp("other"), rope_theta=5000.0)
    options = {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 8 << 20}
    for which in (other, model):
        with open_llm(which, 40, **options) as llm:
            engine = engine_of(llm)
            said = conversations(llm, turns=1)
            stats = engine.scheduler.kv.transfers.tiers[0].stats
            assert not stats.read and not stats.failed
    assert said == expected["auto"][:8]


@pytest.mark.parametrize("damage", ["flip", "cut", "fail"])
def test_a_bad_disk_changes_no_answer(model, expected, tmp_path, damage):
    options = {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 8 << 20}
    with open_llm(model, 40, **options) as llm:
        engine_of(llm)
        conversations(llm)
    (segment,) = tmp_path.rglob("segment-*")
    if damage == "flip":
        data = bytearray(segment.read_bytes())
        for at in range(4096, len(data), 8192 * 3):
            data[at] ^= 1
        segment.write_bytes(data)
    elif damage == "cut":
        os.truncate(segment, segment.stat().st_size // 3)
    with open_llm(model, 40, **options) as llm:
        engine = engine_of(llm)
        (tier,) = engine.scheduler.kv.transfers.tiers
        assert tier.transport.wait_until_scanned(20)
        if damage == "fail":
            tier.transport.files = BadFiles()
            tier.transport.files.fail_reads = tier.transport.files.fail_writes = True
        assert conversations(llm) == expected["auto"]
        engine.scheduler.check_integrity()
        assert damage == "cut" or tier.stats.failed
        assert damage != "fail" or tier.stats.unwritten


def test_settings_that_cannot_be_had_are_refused_in_one_sentence(model, tmp_path):
    with pytest.raises(ConfigError, match="kv_host_memory is 10 bytes, but a block of KV"):
        open_llm(model, 40, kv_host_memory=10)
    with pytest.raises(ConfigError, match="of memory in all; lower it"):
        open_llm(model, 40, kv_host_memory=10**17)
    with pytest.raises(ConfigError, match="set that, too"):
        open_llm(model, 40, kv_disk_bytes=10)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        open_llm(model, 40, kv_host_memory=1 << 20, enable_prefix_caching=False)


def test_a_gpus_way_through_staging_moves_the_same_bytes(model):
    """Plain torch, so it can run on a CPU; the streams are stood in for."""
    with open_llm(model, 16, kv_cache_dtype="int8") as llm:
        state = llm._built.engine.runner.state
        for arena in (state.arena, state.scales):
            arena.view(torch.uint8).random_()
        memory = ArenaMemory(state)
        payloads = memory.allocate(3 * memory.block_bytes)
        views = [payloads[at * memory.block_bytes :][: memory.block_bytes] for at in range(3)]
        memory.gather([5, 0, 3], views)
        memory._staging = torch.empty(4, memory.block_bytes, dtype=torch.uint8)
        memory._copy_staged(torch.tensor([5, 0, 3]), out=True)
        for row, view in zip(memory._staging, views):
            assert bytes(row.numpy()) == bytes(view)
        before = state.arena.clone(), state.scales.clone()
        memory._copy_staged(torch.tensor([1, 2, 4]), out=False)
        for arena, old in zip((state.arena, state.scales), before):
            old[:, :, [1, 2, 4]] = old[:, :, [5, 0, 3]]
            assert torch.equal(arena.view(torch.uint8), old.view(torch.uint8))
