"""Products in plain torch: of every kind of weight, on every device; what is quantized is dequantized each time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.ops import invariant
from tokenmill.ops.matmul import ANY_ROWS, MatmulKernel, MatmulNeed
from tokenmill.ops.types import QuantizedRows, Storage
from tokenmill.ops.weight_words import dequantize, rows_of, unpack

Bias = torch.Tensor | None  # [out]
FLOAT8 = torch.float8_e4m3fn
LIMITS = {FLOAT8: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}
_EXACT_TERMS = 1024  # so many products of two int8 add up to at most 2^24: float32 knows every integer up to there


def quantize_rows(
    x: torch.Tensor,  # [..., in]
    dtype: torch.dtype = FLOAT8,  # or int8
    fixed: torch.Tensor | None = None,  # [] float32: the scale of every row
) -> QuantizedRows:
    """Each row divided by its own scale, so that its largest magnitude becomes the largest code; or all by one.

    A row with something that is not finite keeps a scale that is not: so are its products, and whoever looks sees it.
    """
    low, high = LIMITS[dtype]
    wide = x.float()
    top = wide.abs().amax(-1)
    if fixed is None:
        scale = torch.where(top == 0, 1.0, top / high)
    else:
        scale = torch.where(top.isfinite(), fixed, top)
    codes = wide / scale[..., None]
    codes = codes.round() if dtype == torch.int8 else codes
    return QuantizedRows(codes.clamp(low, high).to(dtype), scale, x.dtype)


def multiply_dense(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    """A dense weight, multiplied in its own dtype."""
    weight = storage["weight"]
    if x.dtype == weight.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).to(x.dtype)


def _invariant(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    weight = storage["weight"]
    return invariant.linear(x, weight, bias) if weight.dim() == 2 else invariant.sliced_linear(x, weight, bias)


def _words(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    codes = unpack(rows_of(storage["weight"]), "fp8" if need.weight == "grouped fp8" else need.weight)
    zeros = rows_of(storage["zeros"]) if need.zeros else None
    return F.linear(x, dequantize(codes, rows_of(storage["scale"]), zeros, x.dtype), bias)


def multiply_float8(need: MatmulNeed, x: torch.Tensor | QuantizedRows, storage: Storage, bias: Bias) -> torch.Tensor:
    wide = x.widen() if isinstance(x, QuantizedRows) else x
    return F.linear(wide, dequantize(storage["weight"], storage["scale"][:, None], None, wide.dtype), bias)


def _int8(need: MatmulNeed, x: QuantizedRows, storage: Storage, bias: Bias) -> torch.Tensor:
    """In pieces that float32 adds up exactly: on CPUs its products are the fastest that torch has for sure."""
    weight, scale = storage["weight"], storage["scale"]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.int32, device=weight.device)
    for left, right in zip(*(torch.split(codes, _EXACT_TERMS, -1) for codes in (x.values, weight))):
        total += (left.float() @ right.float().T).int()
    out = total.to(wide) * scale * x.scale[..., None]
    return (out if bias is None else out + bias).to(x.dtype)


KERNELS = (
    MatmulKernel("the matrix library", ("dense",), multiply_dense, fastest=lambda need: (ANY_ROWS,)),
    MatmulKernel(  # slower: only for who asks for it
        "batch-invariant torch", ("dense",), _invariant, devices=("cpu",), batch_invariant=True, rank=-1
    ),
    MatmulKernel("dequantized by torch", ("int4", "int8", "grouped fp8"), _words),
    MatmulKernel(
        "dequantized by torch", ("fp8",), multiply_float8,
        shape_misfit=lambda need: "rounds no inputs" if need.static_inputs else "",
    ),
    MatmulKernel(
        "dequantized by torch, inputs rounded", ("fp8",), multiply_float8, inputs=FLOAT8, quantize=quantize_rows,
        shape_misfit=lambda need: "" if need.static_inputs else "rounds inputs with a scale of the checkpoint",
    ),
    MatmulKernel(
        "exact sums in torch", ("w8a8",), _int8, inputs=torch.int8, quantize=quantize_rows, batch_invariant=True
    ),
)  # fmt: skip
