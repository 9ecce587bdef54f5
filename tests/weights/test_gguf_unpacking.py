"""Tensors of GGUF files come out the same from the native library and from numpy, and loading tells how far it is."""

from __future__ import annotations

from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from gguf_files import finish

from tokenmill.model.families import spec_from_config
from tokenmill.model.weights import gguf_blocks
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.model.weights.gguf import GGUFCheckpoint
from tokenmill.model.weights.load import load_weights
from tokenmill.ops.native import library
from tokenmill.quant.schemes.packed import Packed
from tokenmill.quant.schemes.scheme import Schemes

HIDDEN, LAYERS, HEADS, VOCAB = 256, 2, 4, 640
Q6_K = gguf.GGMLQuantizationType.Q6_K


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A llama in Q6_K, whose query and key rows are stored in another order; its embedding takes more than 64 KiB."""
    path = tmp_path_factory.mktemp("unpacking") / "model.gguf"
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(512)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)

    def add(name, rows, columns):
        raw = random.integers(0, 256, (rows * columns // 256, 210), dtype=np.uint8)
        raw[:, 208:] = np.abs(random.normal(0, 1e-3, len(raw))).astype(np.float16)[:, None].view(np.uint8)
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=Q6_K)

    add("token_embd.weight", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", 512, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", 512, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, 512)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    return finish(writer, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_native_library_gives_the_bits_that_numpy_gives(file, monkeypatch, dtype):
    checkpoint = GGUFCheckpoint(file)
    monkeypatch.setattr(gguf_blocks, "_SMALL", 0)
    if isinstance(library.load(), str):
        pytest.skip("there is no native library")
    monkeypatch.setattr(gguf_blocks, "dequantize", None)  # whoever asks numpy fails
    native = {name: checkpoint.tensor(name, dtype) for name in checkpoint.names()}
    monkeypatch.undo()
    monkeypatch.setattr(gguf_blocks, "load_native", lambda: "there is no compiler")
    for name, found in native.items():
        assert found.dtype == dtype and torch.equal(checkpoint.tensor(name, dtype), found), name


def test_nobody_waits_for_a_compiler_to_read_the_head_of_a_file(file, monkeypatch):
    monkeypatch.setattr(gguf_blocks, "load_native", None)
    checkpoint = GGUFCheckpoint(file)
    assert checkpoint.tensor("model.norm.weight").eq(1).all()


def loads(checkpoint, dtype, schemes=None):
    seen: list[tuple[int, int]] = []
    spec = spec_from_config(checkpoint.config)
    load_weights(spec, checkpoint, dtype, "cpu", lambda done, total: seen.append((done, total)), schemes)
    return seen, sum(param.numel for param in spec.parameters().values())


@pytest.mark.parametrize("packed", [False, True])
def test_every_tensor_that_was_read_is_told(file, packed):
    if packed and isinstance(library.load(), str):
        pytest.skip("there is no native library")
    checkpoint = GGUFCheckpoint(file)
    seen, total = loads(checkpoint, torch.float32, Schemes(Packed()) if packed else None)
    done = [done for done, _ in seen]
    assert done == sorted(done) and done[0] == 0 and done[-1] == total
    assert {all for _, all in seen} == {total}
    assert len(set(done)) > len(checkpoint.names())  # one for each, and the start
    largest = max(np.prod(checkpoint.tensor(name).shape) for name in checkpoint.names())
    assert max(after - before for before, after in pairwise(done)) == largest


def test_random_weights_are_told_too(file):
    spec, seen = spec_from_config(GGUFCheckpoint(file).config), []
    dummy_weights(spec, torch.float32, "cpu", 0, progress=lambda done, total: seen.append((done, total)))
    total = sum(param.numel for param in spec.parameters().values())
    assert len(seen) == len(spec.parameters()) and seen[-1] == (total, total)
