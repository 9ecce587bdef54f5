"""Norms and activations as the linear layers around them want them: quantized, or as a part of their product."""

from __future__ import annotations

import torch

from tokenmill.ops.registry import Ops
from tokenmill.ops.types import Unnormed
from tokenmill.quant.schemes.device import has_small_gemm
from tokenmill.quant.schemes.row_scaled import RowScaled
from tokenmill.quant.schemes.scheme import Linear, QuantizedRows, Rows


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
    if reader is not None and x.dtype == weight.dtype and reader.fuses(x.shape[0], x.dtype):
        total = torch.empty_like(residual)
        return Unnormed(x, residual, weight, eps, total), total
    scheme = _quantizing(reader, x)
    if reader is None or scheme is None:
        return ops.add_rms_norm(x, residual, weight, eps)
    if not has_small_gemm(x.device):
        normed, residual = ops.add_rms_norm(x, residual, weight, eps)
        return scheme.quantize(normed, reader.storage), residual
    from tokenmill.ops.triton.quantize import add_rms_norm_quantized

    form = scheme.code_dtype, reader.storage.get("input_scale")
    values, scale, residual = add_rms_norm_quantized(x, residual, weight, eps, *form)
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
        if gate_up.fuses(row.shape[0], row.dtype, gated=True) and not reader.wants_quantized(1, row.dtype):
            return gate_up.fused(x, act=kind)
    return act_mul_for(reader, ops, gate_up(x), kind)


def act_mul_for(
    reader: Linear,
    ops: Ops,
    x: torch.Tensor,  # [tokens, 2 * inner]: gate, then up
    kind: str,
) -> Rows:  # [tokens, inner]
    scheme = _quantizing(reader, x)
    if scheme is None:
        return ops.act_mul(x, kind)
    if not has_small_gemm(x.device):
        return scheme.quantize(ops.act_mul(x, kind), reader.storage)
    from tokenmill.ops.triton.quantize import act_mul_quantized

    form = scheme.code_dtype, reader.storage.get("input_scale")
    return QuantizedRows(*act_mul_quantized(x, kind, *form), x.dtype)


def _quantizing(reader: Linear | None, x: torch.Tensor) -> RowScaled | None:
    """The reader's scheme, if it wants such rows quantized."""
    if reader is None or not isinstance(reader.scheme, RowScaled) or not reader.wants_quantized(x.shape[0], x.dtype):
        return None
    return reader.scheme
