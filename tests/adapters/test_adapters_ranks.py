"""Adapters where a model is divided among ranks: they say what one rank says, also after one of them was lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from group_of_threads import group_of as threads_of
from group_of_threads import llm_of_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_folders import write_adapter, write_base
from rank_groups import group_of
from tiny import TINY

from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.engine.ranks.adapter_codec import decode_adapter, encode_adapter, is_adapter
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.model.adapters.peft import AdapterWeights, Base, Factors, read_adapter
from tokenmill.model.adapters.slots import AdapterSlots, slot_bytes
from tokenmill.model.families import spec_from_config
from tokenmill.model.shard import Shard, spec_of
from tokenmill.model.stage import stages_of
from tokenmill.ops.native.library import Library, load
from tokenmill.ops.reference_low_rank import add_low_rank

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 12, [3, 4, 5, 6, 7, 3, 20]]
# float64: what ranks add up in another order differs by far less than any gap between logits
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float64", "device": "cpu", "max_model_len": 128, "max_num_seqs": 8,
    "speculation": "off", "enable_lora": True, "max_loras": 2, "kv_cache_memory": 1 << 22,
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1, "rank": 4, "alpha": 8},
    "some": {"seed": 2, "rank": 7, "alpha": 7, "targets": ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")},
    "high": {"seed": 4, "rank": 1, "alpha": 8, "layers": (1,)},  # nothing for the first stage
}


@dataclass(frozen=True)
class Folders:
    base: str
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    at = tmp_path_factory.mktemp("ranks")
    return Folders(
        str(write_base(at / "base")), {name: write_adapter(at / name, **how) for name, how in ADAPTERS.items()}
    )


def loaded(llm: LLM, folders: Folders) -> LLM:
    for name, folder in folders.adapters.items():
        llm.load_adapter(name, folder)
    return llm


def mixed(llm: LLM) -> list[list[int]]:
    """Rows with and without adapters in the same steps; more adapters than slots."""
    asked = [LoRARequest(name) if name else None for name in ("", *ADAPTERS) for _ in PROMPTS]
    outputs = llm.generate(PROMPTS * (1 + len(ADAPTERS)), GREEDY, False, lora_request=asked)
    llm._built.engine.scheduler.check_integrity()
    return [one.outputs[0].token_ids for one in outputs]


@pytest.fixture(scope="module")
def expected(folders: Folders) -> list[list[int]]:
    with LLM(folders.base, **OPTIONS) as llm:
        found = mixed(loaded(llm, folders))
    assert len({str(found[first::3]) for first in range(3)}) == 3 and len({str(one) for one in found}) == len(found)
    return found


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}], ids=str)
@pytest.mark.parametrize("parallel", ["tp2", "tp4", "pp2", "tp2,pp2"])
def test_ranks_say_with_adapters_what_one_rank_says(
    folders: Folders, expected: list[list[int]], parallel: str, options: dict[str, Any]
) -> None:
    """float32: steps are recorded where there is a native library."""
    with loaded(llm_of_threads(parallel, model=folders.base, **OPTIONS | options), folders) as llm:
        for turn in range(2):
            assert mixed(llm) == expected, turn
        for rank, slots in enumerate(threads_of(llm)._all_slots):
            assert any(one.ranks.any() for one in slots.updates.values()), f"nothing reached rank {rank}"
        if parallel == "pp2" and options and isinstance(load(), Library):
            first, last = threads_of(llm).runners
            assert first._adapted._graph is not None and last.runner._adapted._graph is not None
        llm.unload_adapter("all")
        llm.load_adapter("all", folders.adapters["some"])
        outputs = llm.generate(PROMPTS, GREEDY, False, adapter="all")
        assert [one.outputs[0].token_ids for one in outputs] == expected[6:9], "of the one that has the name now"


def test_drafts_of_ranks_do_not_change_an_adapters_answer(folders: Folders, expected: list[list[int]]) -> None:
    options = OPTIONS | {"dtype": "float32", "speculation": "suffix"}
    with loaded(llm_of_threads("tp2", model=folders.base, **options), folders) as llm:
        for turn in range(3):  # what was said before is proposed again
            assert mixed(llm) == expected, turn
        assert llm._built.engine.speculation is not None


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


@pytest.fixture(scope="module")
def two(folders: Folders) -> Iterator[LLM]:
    """Processes, which record their steps where there is a native library."""
    with LLM(folders.base, parallel="tp2", **OPTIONS | {"dtype": "float32"}) as llm:
        yield loaded(llm, folders)


@needs_linux
def test_a_rank_that_is_replaced_gets_the_adapters_again(two: LLM, expected: list[list[int]]) -> None:
    pool = two._built.engine.scheduler.parts[0].life.adapters
    assert pool is not None and mixed(two) == mixed(two) == expected
    runner = group_of(two).runner
    assert isinstance(runner, TorchRunner)
    assert runner._adapted is None or runner._adapted._graph is not None
    for turn in range(2):
        stream = two.stream(PROMPTS[1], GREEDY, adapter="some")
        next(stream)
        before = pool.stats.loads
        os.kill(group_of(two).pids[0], signal.SIGKILL)
        assert list(stream)[-1].outputs[0].token_ids == expected[7], turn
        assert pool.stats.loads > before, "the slots of new ranks are empty"
        assert mixed(two) == expected, turn


@needs_linux
def test_an_adapter_that_a_rank_cannot_write_costs_nobody_an_answer(
    two: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, failed = group_of(two), []
    assert group.slots is not None
    write = group.slots.write

    def write_later(slot: int, weights: AdapterWeights) -> None:
        if not failed:
            failed.append(slot)
            raise RuntimeError("no room, just this once")
        write(slot, weights)

    monkeypatch.setattr(group.slots, "write", write_later)
    assert mixed(two) == expected and failed


@given(ranks=st.sampled_from([1, 2, 4]), stages=st.sampled_from([1, 2]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_what_ranks_add_is_what_one_adds(ranks: int, stages: int, seed: int) -> None:
    """Of every linear layer: rows of ranks beside each other, or their sums, are those of the whole layer."""
    spec = spec_from_config(TINY)
    base, make = Base(spec, "tiny", 5, torch.float64), torch.Generator().manual_seed(seed)
    factors = []
    for linear, sections in base.sections.items():
        for one in sections:
            rank = int(torch.randint(1, 6, (), generator=make))
            down = torch.randn(rank, base.columns[linear], generator=make, dtype=torch.float64)
            up = torch.randn(rank, one.last - one.first, generator=make, dtype=torch.float64)
            factors.append(Factors(one, down, up))
    weights = AdapterWeights("key", 5, tuple(factors))
    message = encode_adapter(1, weights)
    assert is_adapter(message)
    whole = AdapterSlots(base, spec, 2, torch.device("cpu"), add_low_rank)
    whole.write(1, weights)
    parts = [part for rank in range(ranks) for part in stages_of(spec_of(spec, Shard(rank, ranks)), stages)]
    slots = [AdapterSlots(base, part, 2, torch.device("cpu"), add_low_rank) for part in parts]
    for one, part in zip(slots, parts, strict=True):
        held = sum(updates.down.nbytes + updates.up.nbytes for updates in one.updates.values())
        assert held == 2 * slot_bytes(base, part)
        one.write(*decode_adapter(message))
    slot = torch.tensor([1, -1, 1])
    for linear, updates in whole.updates.items():
        columns = base.columns[linear]
        x = torch.randn(3, columns, generator=make, dtype=torch.float64)
        wanted = updates.add(torch.zeros(3, updates.ends[-1], dtype=torch.float64), x, slot)
        rests = [(one, part) for one, part in zip(slots, parts, strict=True) if linear in one._by_name]
        assert len(rests) == ranks, "each layer is in one stage"
        found = []
        for rank, (one, _) in enumerate(rests):
            mine = one._by_name[linear]
            width = mine.down.shape[2]
            its = x if width == columns else x[:, rank * width : (rank + 1) * width]
            found.append((mine, mine.add(torch.zeros(3, mine.ends[-1], dtype=torch.float64), its, slot)))
        if linear.endswith(("o", "down")):
            total = sum(out for _, out in found)
        else:  # section by section
            cut = [torch.tensor_split(out, list(mine.ends[:-1]), dim=1) for mine, out in found]
            repeated = ranks // 2 if linear.endswith("qkv") and ranks > 2 else 1  # two KV heads for four ranks
            joined = [list(section) for section in zip(*cut, strict=True)]
            joined = [s[::repeated] if n and repeated > 1 else s for n, s in enumerate(joined)]
            total = torch.cat([part for section in joined for part in section], dim=1)
        assert torch.allclose(total, wanted), linear


def test_an_adapter_that_was_read_travels_as_it_is(folders: Folders) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weights = read_adapter(folders.adapters["some"], Base(spec_from_config(TINY), "tiny", 8, dtype))
        slot, other = decode_adapter(encode_adapter(3, weights))
        assert slot == 3 and other.key == weights.key and other.rank == weights.rank
        for mine, theirs in zip(other.factors, weights.factors, strict=True):
            assert mine.section == theirs.section
            assert torch.equal(mine.down, theirs.down) and torch.equal(mine.up, theirs.up)
            assert mine.down.dtype == dtype
