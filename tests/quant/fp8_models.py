"""Runs a prompt through a decoder on the CPU, for fp8 as one row meets it and as many do."""

from __future__ import annotations

import torch

from tokenmill.model.decoder import Decoder, LayerKV, TokenBatch
from tokenmill.ops.matmul import MatmulKernel, only
from tokenmill.ops.matmul_torch import FLOAT8, multiply_float8, quantize_rows
from tokenmill.ops.registry import Need, select
from tokenmill.ops.types import AttentionBatch
from tokenmill.quant.schemes.row_scaled import Fp8

ON_BOTH_SIDES = MatmulKernel("float8 on both sides", ("fp8",), multiply_float8, inputs=FLOAT8, quantize=quantize_rows)


class QuantizedInputs(Fp8):
    """What many rows meet on a GPU: inputs in 8 bits too."""

    def matmul(self, storage, dtype):
        return only(ON_BOTH_SIDES, super().matmul(storage, dtype).need)


def logits_of(spec, weights, ids: list[int]) -> torch.Tensor:  # [len(ids), vocab]
    need = Need(device="cpu", dtype=weights.dtype, head_dim=spec.attention_head_dim, block_size=len(ids))
    decoder = Decoder(spec, weights, select(need), max_len=len(ids))
    kv = [cache_of(shape, spec, len(ids)) for shape in spec.kv_shapes]
    positions = torch.arange(len(ids))
    batch = AttentionBatch(
        rows=torch.tensor([0], dtype=torch.int32),
        q_start=torch.tensor([0, len(ids)], dtype=torch.int32),
        context=torch.tensor([len(ids)], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        num_singles=0, max_query=len(ids), max_context=len(ids),
        host_rows=[0], host_counts=[len(ids)], host_context=[len(ids)],
    )  # fmt: skip
    with torch.inference_mode():
        return decoder.logits(decoder.forward(TokenBatch(torch.tensor(ids), positions, positions, batch), kv))


def cache_of(shape, spec, length: int) -> LayerKV:
    k = torch.zeros(1, length, shape.kv_heads, shape.k_dim)
    if shape.v_dim == 0:
        return LayerKV(k, k[..., spec.mla.rope_dim :])
    return LayerKV(k, torch.zeros(1, length, shape.kv_heads, shape.v_dim))
