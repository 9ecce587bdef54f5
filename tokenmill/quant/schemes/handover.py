"""Norms and activations as the linear layers around them want them: quantized, or as a part of their product."""

from __future__ import annotations

import torch

from tokenmill.ops.registry import Ops
from tokenmill.ops.types import QuantizedRows, Rows, Unnormed
from tokenmill.quant.schemes.scheme import Linear


def add_norm_for(
    reader: Linear | None,  # the only reader of the result; None: several, or one that takes it as it is
    ops: Ops,
    x: torch.Tensor,  # [tokens, dim]
    residual: torch.Tensor,  # [tokens, dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
) -> tuple[Rows, torch.Tensor]:
    """What `add_rms_norm` gives: the norm and the new residual, of one row perhaps not until it is multiplied.

    Inputs may be overwritten.
    """
    if reader is None:
        return ops.add_rms_norm(x, residual, weight, eps)
    if x.dtype == weight.dtype and reader.fuses(x.shape[0], x.dtype):
        total = torch.empty_like(residual)
        return Unnormed(x, residual, weight, eps, total), total
    codes = reader.inputs(x.shape[0], x.dtype)
    if codes is None:
        return ops.add_rms_norm(x, residual, weight, eps)
    fused = ops.chosen.get("add_rms_norm_quantized")
    if fused is None:
        normed, residual = ops.add_rms_norm(x, residual, weight, eps)
        return reader.matmul(x.dtype).quantize(normed, reader.storage), residual
    values, scale, residual = fused.fn(x, residual, weight, eps, codes, reader.storage.get("input_scale"))
    return QuantizedRows(values, scale, x.dtype), residual


def gate_up_for(
    reader: Linear,
    ops: Ops,
    gate_up: Linear,
    x: Rows,  # [tokens, in]
    kind: str,
) -> Rows:  # [tokens, inner]
    """The gated activation of a product, which takes it in where it can."""
    if not isinstance(x, QuantizedRows):
        row = x.update if isinstance(x, Unnormed) else x
        if gate_up.fuses(row.shape[0], row.dtype, gated=True) and reader.inputs(1, row.dtype) is None:
            return gate_up.fused(x, act=kind)
    run = gate_up.gated(x) if isinstance(x, torch.Tensor) else None
    if run is not None and isinstance(x, torch.Tensor) and reader.inputs(x.shape[0], x.dtype) is None:
        return run(x, gate_up.storage, kind)
    return act_mul_for(reader, ops, gate_up(x), kind)


def act_mul_for(
    reader: Linear,
    ops: Ops,
    x: torch.Tensor,  # [tokens, 2 * inner]: gate, then up
    kind: str,
) -> Rows:  # [tokens, inner]
    codes = reader.inputs(x.shape[0], x.dtype)
    if codes is None:
        return ops.act_mul(x, kind)
    fused = ops.chosen.get("act_mul_quantized")
    if fused is None:
        return reader.matmul(x.dtype).quantize(ops.act_mul(x, kind), reader.storage)
    values, scale = fused.fn(x, kind, codes, reader.storage.get("input_scale"))
    return QuantizedRows(values, scale, x.dtype)
