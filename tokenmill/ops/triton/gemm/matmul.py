"""What the kernels of products declare: weights, inputs, GPUs, and for how many rows each is the fastest."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from tokenmill.ops.device_facts import GEMM, HOPPER, multiprocessors
from tokenmill.ops.matmul import NO_LIMIT, MatmulKernel, MatmulNeed, Run, RunFused, Span
from tokenmill.ops.triton.gemm import invariant, quantize, small, weight_only
from tokenmill.ops.triton.gemm.weight_codes import TILE, Codes, parts_of
from tokenmill.ops.triton.launch import ceil_div
from tokenmill.ops.types import QuantizedRows, Storage, Unnormed

Rows = torch.Tensor | QuantizedRows
Bias = torch.Tensor | None
HALVES = (torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn
WORDS = {"int4": "int4", "int8": "int8", "grouped fp8": "fp8"}  # weights of small codes -> their kind
# Up to here rows stay in their own dtype; with more, float8 on both sides is faster in spite of the quantizing launch.
WIDE_INPUT_ROWS = 1
# From here on tiles of 128 rows are ahead of the small ones, the library's or ours (scripts/gpu_w8a8.py).
TILED_ROWS = 65
_LIBRARY_ALIGNMENT = 16  # both dims of a float8 weight, elements
_COUNTED_ROW_TILES = 4  # sums of eight bits on both sides are cut into parts up to several hundred rows


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, fixed: torch.Tensor | None) -> QuantizedRows:  # [rows, in]
    return QuantizedRows(*quantize.quantize_rows(x, dtype, fixed), x.dtype)


def _dense(need: MatmulNeed) -> Run:
    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        weight = storage["weight"]
        if x.stride(1) != 1 or x.stride(0) % 8:
            return F.linear(x, weight, bias)
        return small.small_gemm(x, weight, bias, counters=storage.get("counters"))

    return run


def _dense_misfit(need: MatmulNeed) -> str:
    if need.weight_dtype not in (None, need.dtype):
        return f"its weight is {str(need.weight_dtype).removeprefix('torch.')}"
    return f"its {need.in_features} inputs are no multiple of 64" if need.in_features % 64 else ""


def _dense_fastest(need: MatmulNeed) -> tuple[Span, ...]:
    return small.fastest_rows(need.out_features, need.in_features)


def _invariant(need: MatmulNeed) -> Run:
    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return invariant.invariant_gemm(x, storage["weight"], bias, dtype=need.out_dtype)

    return run


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


def _in_registers(need: MatmulNeed) -> Run:
    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return weight_only.weight_only_gemm(x, _codes(need, storage), bias, counters=storage["counters"])

    return run


def _dequantized(need: MatmulNeed) -> Run:
    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return F.linear(x, weight_only.widened(_codes(need, storage), x.dtype), bias)

    return run


def _fused_row(need: MatmulNeed) -> RunFused:
    from tokenmill.ops.triton.gemm.one_row import one_row_gemm  # in Gluon, which not every Triton has

    def run(x: torch.Tensor | Unnormed, storage: Storage, bias: Bias, act: str) -> torch.Tensor:
        return one_row_gemm(x, _codes(need, storage), bias, act)

    return run


def _one_row(need: MatmulNeed) -> Run:
    fused = _fused_row(need)

    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return fused(x.contiguous(), storage, bias, "")

    return run


def _one_row_misfit(need: MatmulNeed) -> str:
    """As one_row.py streams them: whole groups in a stage, and the inputs fit into shared memory."""
    if need.zeros or need.group not in (64, 128):
        return "only for groups of 64 and 128 without zeros"
    tiles = need.in_features // (TILE * parts_of("int4"))
    if reason := _words_misfit(need):
        return reason
    if tiles % ONE_ROW_TILES or tiles > MOST_ONE_ROW_TILES:
        width = TILE * parts_of("int4")
        return f"its {need.in_features} inputs are no multiple of {ONE_ROW_TILES * width}, or too many"
    return ""


ONE_ROW_TILES, MOST_ONE_ROW_TILES = 16, 1024  # a stage of all warps, and so that inputs fit into shared memory


def _float8_wide_inputs(need: MatmulNeed) -> Run:
    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return small.small_gemm(
            x, storage["weight"], bias, scale=storage["scale"], counters=storage["counters"]
        )

    return run


def _eight_bits(need: MatmulNeed) -> Run:
    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, QuantizedRows)
        return small.small_gemm(
            x.values, storage["weight"], bias, scale=storage["scale"], x_scale=x.scale, counters=storage["counters"],
            dtype=x.dtype,
        )  # fmt: skip

    return run


def _eight_bits_hopper(need: MatmulNeed) -> Run:
    from tokenmill.ops.triton.gemm.hopper import hopper_gemm  # in Gluon, which not every Triton has

    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, QuantizedRows)
        values = x.values
        if not values.is_contiguous() or values.data_ptr() % 16:  # as the copy engine needs them; ours always are
            values = values.clone(memory_format=torch.contiguous_format)
        rest = storage["weight"], storage["scale"], bias, storage["counters"], x.dtype
        return hopper_gemm(values, x.scale, *rest)

    return run


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


def _float8_library(need: MatmulNeed) -> Run:
    def run(x: Rows, storage: Storage, bias: Bias) -> torch.Tensor:
        assert isinstance(x, QuantizedRows)
        scales = x.scale[:, None], storage["scale"][None, :]
        out = torch._scaled_mm(x.values, storage["weight"].t(), *scales, out_dtype=x.dtype, use_fast_accum=True)
        return out if bias is None else out.add_(bias)

    return run


def _float8_library_misfit(need: MatmulNeed) -> str:
    if need.in_features % _LIBRARY_ALIGNMENT or need.out_features % _LIBRARY_ALIGNMENT:
        return f"its sizes are no multiples of {_LIBRARY_ALIGNMENT}"
    return ""


def _split_k_counters(out_features: int) -> int:
    return small.counters_for(_COUNTED_ROW_TILES * out_features)


_GPU = MatmulKernel("", (), _dense, devices=("cuda",), requires=GEMM, counters=small.counters_for)
_SMALL_TILES = replace(
    _GPU,
    name="eight bits on both sides, small tiles",
    weights=("w8a8", "fp8"),
    make=_eight_bits,
    rows=(1, NO_LIMIT),
    fastest=lambda need: ((1, TILED_ROWS - 1),),
    quantize=quantize_rows,
    counters=_split_k_counters,
    rank=10,
)
_HOPPER_TILES = replace(
    _SMALL_TILES,
    name="eight bits on both sides, warp-specialised",
    make=_eight_bits_hopper,
    dtypes=HALVES,
    requires=HOPPER,
    shape_misfit=_hopper_misfit,
    rows=(TILED_ROWS, NO_LIMIT),
    rank=30,
)

KERNELS = (
    replace(
        _GPU,
        name="few rows",
        weights=("dense",),
        dtypes=HALVES,
        shape_misfit=_dense_misfit,
        rows=(1, small.MOST_FASTEST_ROWS),
        fastest=_dense_fastest,
        rank=5,
    ),
    replace(
        _GPU,
        name="batch-invariant",
        weights=("dense",),
        make=_invariant,
        dtypes=(torch.float32, *HALVES),
        shape_misfit=_invariant_misfit,
        counters=lambda out_features: 0,
        batch_invariant=True,
        rank=-1,  # slower: only for who asks for it
    ),
    replace(
        _GPU,
        name="codes dequantized in registers",
        weights=tuple(WORDS),
        make=_in_registers,
        dtypes=HALVES,
        shape_misfit=_words_misfit,
        rows=(1, NO_LIMIT),
        fastest=lambda need: ((1, _most_rows(need)),),
        rank=20,
    ),
    replace(
        _GPU,
        name="dequantized for the matrix library",
        weights=tuple(WORDS),
        make=_dequantized,
        dtypes=HALVES,
        shape_misfit=_words_misfit,
        rows=(1, NO_LIMIT),
        fastest=lambda need: ((_most_rows(need) + 1, NO_LIMIT),),
        rank=10,
    ),
    replace(
        _GPU,
        name="one int4 row",
        weights=("int4",),
        make=_one_row,
        dtypes=HALVES,
        requires=HOPPER,
        shape_misfit=_one_row_misfit,
        rows=(1, 1),
        fastest=lambda need: ((1, 1),),
        fuse=_fused_row,
        gates=lambda need: need.out_features // TILE % 2 == 0,  # so that no band has gate and up
        rank=30,
    ),
    replace(
        _GPU,
        name="float8 weights, inputs as they are",
        weights=("fp8",),
        make=_float8_wide_inputs,
        dtypes=HALVES,
        shape_misfit=lambda need: "inputs have a scale of the checkpoint" if need.static_inputs else "",
        rows=(1, WIDE_INPUT_ROWS),
        fastest=lambda need: ((1, WIDE_INPUT_ROWS),),
        rank=15,
    ),
    replace(_SMALL_TILES, weights=("fp8",), dtypes=HALVES, inputs=FLOAT8),
    replace(_SMALL_TILES, weights=("w8a8",), dtypes=(torch.float32, *HALVES), inputs=torch.int8, batch_invariant=True),
    replace(_HOPPER_TILES, weights=("fp8",), fastest=_hopper_float8_fastest, inputs=FLOAT8),
    replace(
        _HOPPER_TILES,
        weights=("w8a8",),
        fastest=lambda need: ((TILED_ROWS, NO_LIMIT),),
        inputs=torch.int8,
        batch_invariant=True,
    ),
    replace(
        _SMALL_TILES,
        name="float8 in the matrix library",
        weights=("fp8",),
        make=_float8_library,
        dtypes=(torch.bfloat16,),
        shape_misfit=_float8_library_misfit,
        fastest=lambda need: ((TILED_ROWS, NO_LIMIT),),
        inputs=FLOAT8,
        rank=20,
    ),
)
