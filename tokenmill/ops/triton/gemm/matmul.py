"""What the kernels of products declare: weights, inputs, GPUs, and for how many rows each is the fastest."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from tokenmill.ops.device_facts import FLOAT8, FLOAT8_LIBRARY, HOPPER, INVARIANT, PRODUCTS, multiprocessors
from tokenmill.ops.matmul import NO_LIMIT, MatmulKernel, MatmulNeed, Span
from tokenmill.ops.triton.gemm import invariant, quantize, small, weight_only
from tokenmill.ops.triton.gemm.weight_codes import TILE, Codes, parts_of
from tokenmill.ops.triton.launch import ceil_div
from tokenmill.ops.types import QuantizedRows, Storage, Unnormed

Bias = torch.Tensor | None  # [out]
HALVES = (torch.bfloat16, torch.float16)
THREE_FLOATS = (torch.float32, *HALVES)
E4M3 = torch.float8_e4m3fn
WORDS = {"int4": "int4", "int8": "int8", "grouped fp8": "fp8"}  # weights of small codes -> their kind
# Up to here rows stay in their own dtype; with more, float8 on both sides is faster in spite of the quantizing launch.
WIDE_INPUT_ROWS = 1
# From here on tiles of 128 rows are ahead of the small ones, the library's or ours (scripts/gpu_w8a8.py).
TILED_ROWS = 65
# Where an activation inside of the product is ahead of one behind it (scripts/gpu_gated.py).
TINY_GATE_UP, LARGE_GATE_UP, MANY_ROWS = 2 << 20, 32 << 20, 1024
# Rows up to which any weight is streamed, and by how many tiles of them small ones are (scripts/gpu_gated.py --plain).
STREAMED_ROWS, STREAMED_TILES, SMALL_WEIGHT = 64, 4, 4 << 20
ONE_ROW_TILES, MOST_ONE_ROW_TILES = 16, 1024  # a stage of all warps, and so that inputs fit into shared memory
_LIBRARY_ALIGNMENT = 16  # both dims of a float8 weight, elements
_COUNTED_ROW_TILES = 4  # sums of eight bits on both sides are cut into parts up to several hundred rows


@cache
def _gluon(name: str) -> Any:
    """A module of kernels in Gluon, which not every Triton has."""
    return importlib.import_module(f"tokenmill.ops.triton.gemm.{name}")


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, fixed: torch.Tensor | None) -> QuantizedRows:  # [rows, in]
    return QuantizedRows(*quantize.quantize_rows(x, dtype, fixed), x.dtype)


def _dense(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    if x.stride(1) != 1 or x.stride(0) % 8:
        return F.linear(x, storage["weight"], bias)
    return small.small_gemm(x, storage["weight"], bias, counters=storage.get("counters"))


def _dense_misfit(need: MatmulNeed) -> str:
    if need.weight_dtype not in (None, need.dtype):
        return f"its weight is {str(need.weight_dtype).removeprefix('torch.')}"
    return f"its {need.in_features} inputs are no multiple of 64" if need.in_features % 64 else ""


def _streamed(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    if not x.is_contiguous() or x.data_ptr() % 16:  # as the copy engine needs them; ours always are
        x = x.clone(memory_format=torch.contiguous_format)
    out: torch.Tensor = _gluon("stream").stream_gemm(x, storage["weight"], bias, storage.get("counters"))
    return out


def _streamed_misfit(need: MatmulNeed) -> str:
    if need.weight_dtype not in (None, need.dtype):
        return _dense_misfit(need)
    if need.in_features % 8:
        return f"its {need.in_features} inputs are no multiple of 8"
    if need.out_features > 64 * multiprocessors(need.device):
        return f"its {need.out_features} outputs are more than one wave of programs"
    return ""


def _streamed_fastest(need: MatmulNeed) -> tuple[Span, ...]:
    tiles = 1
    if need.out_features * need.in_features <= SMALL_WEIGHT:
        tiles = max(1, min(STREAMED_TILES, multiprocessors(need.device) // -(-need.out_features // 64)))
    return ((2, STREAMED_ROWS * tiles),)


def _invariant(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    return invariant.invariant_gemm(x, storage["weight"], bias, dtype=need.out_dtype)


def _invariant_misfit(need: MatmulNeed) -> str:
    if need.in_features * need.dtype.itemsize % invariant.ALIGNMENT:
        return f"rows of {need.in_features} inputs are no multiples of {invariant.ALIGNMENT} bytes"
    return ""


def _codes(need: MatmulNeed, storage: Storage) -> Codes:
    return Codes(storage["weight"], storage["scale"], storage.get("zeros"), WORDS[need.weight])


def _words_misfit(need: MatmulNeed) -> str:
    return "" if need.tiled else "its codes do not fill whole tiles"


def _most_rows(need: MatmulNeed) -> int:
    return weight_only.most_rows(need.zeros, need.group)


def _in_registers(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    return weight_only.weight_only_gemm(x, _codes(need, storage), bias, counters=storage["counters"])


def _dequantized(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    return F.linear(x, weight_only.widened(_codes(need, storage), x.dtype), bias)


def _fused_row(
    need: MatmulNeed, x: torch.Tensor | Unnormed, storage: Storage, bias: Bias, act: str = ""
) -> torch.Tensor:
    x = x if isinstance(x, Unnormed) else x.contiguous()
    out: torch.Tensor = _gluon("one_row").one_row_gemm(x, _codes(need, storage), bias, act)
    return out


def _one_row_misfit(need: MatmulNeed) -> str:
    """As one_row.py streams them: whole groups in a stage, and the inputs fit into shared memory."""
    if need.zeros or need.group not in (64, 128):
        return "only for groups of 64 and 128 without zeros"
    if reason := _words_misfit(need):
        return reason
    tiles, width = need.in_features // (TILE * parts_of("int4")), TILE * parts_of("int4")
    if tiles % ONE_ROW_TILES or tiles > MOST_ONE_ROW_TILES:
        return f"its {need.in_features} inputs are no multiple of {ONE_ROW_TILES * width}, or too many"
    return ""


def _gated_few(need: MatmulNeed, x: torch.Tensor, storage: Storage, act: str) -> torch.Tensor:
    out: torch.Tensor = _gluon("gated_few").gated_few(x, storage["weight"], act)
    return out


def _gated(need: MatmulNeed, x: torch.Tensor, storage: Storage, act: str) -> torch.Tensor:
    out: torch.Tensor = _gluon("gated").gated_gemm(x, storage["weight"], act)
    return out


def _gated_misfit(need: MatmulNeed) -> str:
    if need.weight_dtype not in (None, need.dtype):
        return _dense_misfit(need)
    if need.in_features % 8 or need.out_features % 16:
        return "its inputs are no multiple of 8, or its outputs none of 16"
    return ""


def _gated_few_fastest(need: MatmulNeed) -> tuple[Span, ...]:
    """Beyond 64 rows only of large weights, and not while the second warpgroup has few of them; and of tiny ones."""
    size = need.out_features * need.in_features
    if size <= TINY_GATE_UP:
        return ((2, 128),)
    return ((2, 64), (97, 128)) if size >= LARGE_GATE_UP else ((2, 64),)


def _float8_wide_inputs(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: Bias) -> torch.Tensor:
    return small.small_gemm(x, storage["weight"], bias, scale=storage["scale"], counters=storage["counters"])


def _eight_bits(need: MatmulNeed, x: QuantizedRows, storage: Storage, bias: Bias) -> torch.Tensor:
    return small.small_gemm(
        x.values, storage["weight"], bias,
        scale=storage["scale"], x_scale=x.scale, counters=storage["counters"], dtype=x.dtype,
    )  # fmt: skip


def _eight_bits_hopper(need: MatmulNeed, x: QuantizedRows, storage: Storage, bias: Bias) -> torch.Tensor:
    values = x.values
    if not values.is_contiguous() or values.data_ptr() % 16:  # as the copy engine needs them; ours always are
        values = values.clone(memory_format=torch.contiguous_format)
    weight, scale, counters = storage["weight"], storage["scale"], storage["counters"]
    out: torch.Tensor = _gluon("hopper").hopper_gemm(values, x.scale, weight, scale, bias, counters, x.dtype)
    return out


def _hopper_misfit(need: MatmulNeed) -> str:
    if need.in_features % 16 or need.out_features % 8:
        return "its inputs are no multiple of 16, or its outputs none of 8"
    return ""


def _hopper_float8_fastest(need: MatmulNeed) -> tuple[Span, ...]:
    """While there are tiles for less than most of the device: there the library is behind, because it does not cut the
    inner dimension into parts (36.4 us, ours 29.7, of 256 rows with 4096 x 14336). With more it is level or ahead.
    """
    row_tiles = 3 * multiprocessors(need.device) // (4 * ceil_div(need.out_features, 128))
    return ((TILED_ROWS, 128 * row_tiles),) if 128 * row_tiles >= TILED_ROWS else ()


def _float8_library(need: MatmulNeed, x: QuantizedRows, storage: Storage, bias: Bias) -> torch.Tensor:
    scales = x.scale[:, None], storage["scale"][None, :]
    out = torch._scaled_mm(x.values, storage["weight"].t(), *scales, out_dtype=x.dtype, use_fast_accum=True)
    return out if bias is None else out.add_(bias)


def _float8_library_misfit(need: MatmulNeed) -> str:
    if need.in_features % _LIBRARY_ALIGNMENT or need.out_features % _LIBRARY_ALIGNMENT:
        return f"its sizes are no multiples of {_LIBRARY_ALIGNMENT}"
    return ""


_GPU = MatmulKernel("", (), _dense, devices=("cuda",), requires=PRODUCTS, counters=small.counters_for)
_WORDS = replace(_GPU, weights=tuple(WORDS), dtypes=HALVES, shape_misfit=_words_misfit, rows=(1, NO_LIMIT))
_BOTH_SIDES = replace(
    _GPU, rows=(1, NO_LIMIT), quantize=quantize_rows,
    counters=lambda out_features: small.counters_for(_COUNTED_ROW_TILES * out_features),
)  # fmt: skip
_SMALL_TILES = replace(
    _BOTH_SIDES, name="eight bits on both sides, small tiles", run=_eight_bits, rank=10,
    fastest=lambda need: ((1, TILED_ROWS - 1),),
)  # fmt: skip
_HOPPER_TILES = replace(
    _BOTH_SIDES, name="eight bits on both sides, warp-specialised", run=_eight_bits_hopper, rank=30, dtypes=HALVES,
    requires=HOPPER, shape_misfit=_hopper_misfit, rows=(TILED_ROWS, NO_LIMIT),
)  # fmt: skip

KERNELS = (
    replace(
        _GPU, name="few rows", weights=("dense",), run=_dense, rank=5, dtypes=HALVES, shape_misfit=_dense_misfit,
        rows=(1, small.MOST_FASTEST_ROWS), fastest=lambda need: small.fastest_rows(need.out_features, need.in_features),
    ),
    replace(
        _GPU, name="few rows, streamed", weights=("dense",), run=_streamed, rank=30, dtypes=HALVES, requires=HOPPER,
        shape_misfit=_streamed_misfit, rows=(2, STREAMED_TILES * STREAMED_ROWS), fastest=_streamed_fastest,
        counters=lambda out_features: STREAMED_TILES * small.counters_for(out_features),
    ),
    replace(
        _GPU, name="gate, up and activation, few rows", weights=("dense",), run=_gated_few, gated=True, dtypes=HALVES,
        rank=30, requires=HOPPER, shape_misfit=_gated_misfit, fastest=_gated_few_fastest,
        counters=lambda out_features: 0,
    ),
    replace(
        _GPU, name="gate, up and activation", weights=("dense",), run=_gated, gated=True, dtypes=HALVES, rank=30,
        requires=HOPPER, shape_misfit=_gated_misfit, fastest=lambda need: ((MANY_ROWS, NO_LIMIT),),
        counters=lambda out_features: 0,
    ),
    replace(  # slower: only for who asks for it
        _GPU, name="batch-invariant", weights=("dense",), run=_invariant, rank=-1, dtypes=THREE_FLOATS,
        requires=INVARIANT, shape_misfit=_invariant_misfit, counters=lambda out_features: 0, batch_invariant=True,
    ),
    replace(
        _WORDS, name="codes dequantized in registers", run=_in_registers, rank=20,
        fastest=lambda need: ((1, _most_rows(need)),),
    ),
    replace(
        _WORDS, name="dequantized for the matrix library", run=_dequantized, rank=10,
        fastest=lambda need: ((_most_rows(need) + 1, NO_LIMIT),),
    ),
    replace(
        _WORDS, name="one int4 row", weights=("int4",), run=_fused_row, rank=30, requires=HOPPER,
        shape_misfit=_one_row_misfit, rows=(1, 1), fastest=lambda need: ((1, 1),),
        fused=_fused_row, gates=lambda need: need.out_features // TILE % 2 == 0,  # so that no band has gate and up
    ),
    replace(
        _GPU, name="float8 weights, inputs as they are", weights=("fp8",), run=_float8_wide_inputs, rank=15,
        requires=FLOAT8, dtypes=HALVES,
        shape_misfit=lambda need: "inputs have a scale of the checkpoint" if need.static_inputs else "",
        rows=(1, WIDE_INPUT_ROWS), fastest=lambda need: ((1, WIDE_INPUT_ROWS),),
    ),
    replace(_SMALL_TILES, weights=("fp8",), dtypes=HALVES, inputs=E4M3, requires=FLOAT8),
    replace(_SMALL_TILES, weights=("w8a8",), dtypes=THREE_FLOATS, inputs=torch.int8, batch_invariant=True),
    replace(_HOPPER_TILES, weights=("fp8",), inputs=E4M3, fastest=_hopper_float8_fastest),
    replace(
        _HOPPER_TILES, weights=("w8a8",), inputs=torch.int8, fastest=lambda need: ((TILED_ROWS, NO_LIMIT),),
        batch_invariant=True,
    ),
    replace(
        _BOTH_SIDES, name="float8 in the matrix library", weights=("fp8",), run=_float8_library, rank=20,
        dtypes=(torch.bfloat16,), inputs=E4M3, requires=FLOAT8_LIBRARY, shape_misfit=_float8_library_misfit,
        fastest=lambda need: ((TILED_ROWS, NO_LIMIT),),
    ),
)  # fmt: skip
