"""KV to and from pinned host memory on a GPU: the same bytes, the same tokens, and how fast."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
sys.path.append(str(Path(__file__).parents[1] / "tiers"))


def test_blocks_come_back_bit_for_bit_while_steps_run(tiny_model: str) -> None:
    from tokenmill import LLM, SamplingParams
    from tokenmill.engine.runner.block_memory import ArenaMemory

    with LLM(tiny_model, load_format="dummy", skip_tokenizer_init=True, device="cuda", max_model_len=128) as llm:
        state = llm._built.engine.runner.state  # type: ignore[attr-defined]
        memory = ArenaMemory(state)
        blocks = list(range(state.num_blocks - 40, state.num_blocks))
        state.arena.view(torch.uint8)[:, :, blocks] = torch.randint(0, 255, (1,), dtype=torch.uint8, device="cuda")
        before = state.arena[:, :, blocks].clone()
        host = memory.allocate(40 * memory.block_bytes)
        views = [host[at * memory.block_bytes : (at + 1) * memory.block_bytes] for at in range(40)]
        memory.gather(blocks, views)
        state.arena[:, :, blocks] = 0
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        memory.scatter(blocks, views)
        assert torch.equal(state.arena[:, :, blocks].view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_tokens_are_those_of_an_engine_with_plenty_of_memory(tiny_model: str, dtype: str) -> None:
    from test_tiers_same_tokens import conversations

    from tokenmill import LLM

    said = []
    for blocks, host in ((400, None), (40, 64 << 20)):
        options = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_dtype": dtype, "kv_host_memory": host}
        size = blocks * 16 * 2 * 2 * 2 * 8 * 2
        with LLM(
            tiny_model, load_format="dummy", skip_tokenizer_init=True, device="cuda", kv_cache_memory=size, **options
        ) as llm:
            said.append(conversations(llm))
            transfers = llm._built.engine.scheduler.kv.transfers
    assert transfers is not None and transfers.tiers[0].stats.read > 0
    same = sum(a == b for a, b in zip(*said, strict=True))
    assert same == len(said[0])


def test_bandwidth_is_told() -> None:
    """No claim yet: what the machine reached is printed (run with -s)."""
    from types import SimpleNamespace
    from typing import Any

    from tokenmill.engine.runner.block_memory import ArenaMemory

    arena = torch.zeros(28, 2, 4096, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    state: Any = SimpleNamespace(arena=arena, scales=None, beside=[])
    memory = ArenaMemory(state)
    count = 256
    host = memory.allocate(count * memory.block_bytes)
    views = [host[at * memory.block_bytes : (at + 1) * memory.block_bytes] for at in range(count)]
    blocks = torch.randperm(4096)[:count].tolist()
    for name, copy in (("to the host", memory.gather), ("to the device", memory.scatter)):
        copy(blocks, views)
        started = time.perf_counter()
        for _ in range(5):
            copy(blocks, views)
        rate = 5 * count * memory.block_bytes / (time.perf_counter() - started)
        print(f"{name}: {rate / 1e9:.1f} GB/s")
