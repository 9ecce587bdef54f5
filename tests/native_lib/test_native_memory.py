"""Memory of the KV cache: its beginning is there before it is written."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import pytest
import torch
from tiny import write_tiny

from tokenmill import LLM
from tokenmill.engine.runner import arenas
from tokenmill.ops.native import library
from tokenmill.ops.native.arena import Arena

LARGE = 2 << 20


def resident(memory: torch.Tensor) -> list[bool]:  # uint8, beginning with a page
    """Of each page, whether the system has given memory for it."""
    pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), pages):
        pytest.skip("this system does not say which pages are there")
    return [bool(page & 1) for page in pages]


@pytest.fixture
def populating(native: library.Library) -> library.Library:
    memory = Arena(native).take(LARGE)
    native.c.tm_populate(memory.data_ptr(), len(memory))
    if not all(resident(memory)):
        pytest.skip("this system cannot populate memory (Linux 5.14 can)")
    return native


def test_only_what_is_asked_for_is_populated_and_keeps_what_it_holds(populating: library.Library) -> None:
    memory = Arena(populating).take(16 * LARGE)
    memory[5] = 7
    populating.c.tm_populate(memory.data_ptr(), 3 * LARGE)
    assert memory[5] == 7 and not memory[6 : 3 * LARGE].any()
    assert all(resident(memory[: 3 * LARGE])) and not any(resident(memory[4 * LARGE :]))


def test_the_first_blocks_are_ready_after_the_start(
    populating: library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "FIRST_BYTES", LARGE)
    model = write_tiny(tmp_path, max_position_embeddings=65536)
    with LLM(
        model, load_format="dummy", device="cpu", skip_tokenizer_init=True, max_num_seqs=8, kv_cache_memory=16 * LARGE,
        max_model_len=2048,
    ) as llm:  # fmt: skip
        for thread in threading.enumerate():
            if thread.name == "kv-memory":
                thread.join()
        arena = llm._built.engine.runner.state.arena
        there = resident(torch.empty(0, dtype=torch.uint8).set_(arena.untyped_storage()))
        pages = LARGE // mmap.PAGESIZE
        assert all(there[:pages]) and not any(there[2 * pages :])
