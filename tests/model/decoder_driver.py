"""Runs one sequence through a Decoder: allocates its paged cache, prefills in chunks, decodes greedily."""

from __future__ import annotations

from pathlib import Path

import torch

from tokenmill.model.decoder import Decoder, LayerKV, TokenBatch
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.load import load_weights
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.ops.registry import Need, select
from tokenmill.ops.types import AttentionBatch

BLOCK = 4


def load_decoder(directory: Path, max_len: int, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = SafetensorsCheckpoint(directory)
    spec = spec_from_config(checkpoint.config)
    return make_decoder(spec, load_weights(spec, checkpoint, dtype, "cpu"), max_len)


def make_decoder(spec, weights, max_len: int) -> Decoder:
    need = Need(device="cpu", dtype=weights.dtype, head_dim=spec.attention_head_dim, block_size=BLOCK)
    return Decoder(spec, weights, select(need, prefer="reference"), max_len=max_len)


class Sequence:
    """One sequence whose blocks lie scattered and out of order in a pool full of NaN."""

    def __init__(self, decoder: Decoder, max_len: int) -> None:
        self.decoder = decoder
        self.length = 0
        blocks = -(-max_len // BLOCK)
        self.table = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(1))[:blocks].int()[None]
        self.kv = [self._cache(shape, 2 * blocks) for shape in decoder.spec.kv_shapes]

    def _cache(self, shape, blocks: int) -> LayerKV:
        dtype = self.decoder.weights.dtype
        k = torch.full((blocks, BLOCK, shape.kv_heads, shape.k_dim), float("nan"), dtype=dtype)
        if shape.v_dim == 0:
            return LayerKV(k, k[..., self.decoder.spec.mla.rope_dim :])
        return LayerKV(k, torch.full((blocks, BLOCK, shape.kv_heads, shape.v_dim), float("nan"), dtype=dtype))

    def push(self, ids: list[int], wanted: list[int] | None = None) -> torch.Tensor:  # [len(wanted or ids), vocab]
        """Compute these tokens after those already computed."""
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        slots = self.table[0][positions // BLOCK].long() * BLOCK + positions % BLOCK
        batch = AttentionBatch(
            rows=torch.tensor([0], dtype=torch.int32),
            q_start=torch.tensor([0, len(ids)], dtype=torch.int32),
            context=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self.table,
            num_singles=int(len(ids) == 1),
            max_query=len(ids),
            max_context=self.length,
            host_rows=[0],
            host_counts=[len(ids)],
            host_context=[self.length],
        )
        with torch.inference_mode():
            rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
            tokens = TokenBatch(torch.tensor(ids), positions, slots, batch)
            return self.decoder.logits(self.decoder.forward(tokens, self.kv, wanted=rows))


def greedy(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    sequence = Sequence(decoder, len(prompt) + count)
    tokens = [int(sequence.push(prompt)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(sequence.push(tokens[-1:])[-1].argmax()))
    return tokens
