"""Products with weights of four or eight bits: the codes are read once and become floats in registers.

A row or a few have a kernel of their own (weight_only_few.py). More go through the tensor cores with the weight as
the left operand (`_gemm_kernel`), split over the inner dimension where there are too few tiles. Codes are multiplied as
exact small numbers, and each group's sum is scaled in float32. For many rows a weight is worth widening: `widened`
writes it out as 16-bit floats for the matrix library.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import multiprocessors, room
from tokenmill.ops.triton.config import power_of_two
from tokenmill.ops.triton.gemm.small import MAX_SPLITS, GemmShape, finish_tile
from tokenmill.ops.triton.gemm.weight_codes import TILE, Codes, axis, in_order, lane_axis, parts_of, unpack
from tokenmill.ops.triton.gemm.weight_only_few import FewShape, launch_few
from tokenmill.ops.triton.launch import ceil_div, prefetch_constants, quick_launch, start_next, wait_for_previous

MOST_ROWS, MOST_ROWS_OF_COSTLY = 192, 128  # costly: with zeros or with groups of 32
FEW_ROWS, FEW_INNER = 4, 4096  # at most, of what the kernel of few rows multiplies faster than the other
MOST_ROWS_OF_A_TILE = 64
SHARED_BYTES = 216 << 10  # of a multiprocessor, for pipelines
PREFETCHED_LINES = tl.constexpr(16)  # of each band, while the previous kernel still runs
LINE = tl.constexpr(64)  # words of a line of the cache


def weight_only_gemm(
    x: torch.Tensor,  # [rows, inner]; bfloat16 or float16
    codes: Codes,
    bias: torch.Tensor | None = None,  # [columns]
    *,
    counters: torch.Tensor | None = None,  # [counters_for(columns)] int32 zeros, zero again afterwards; None: no parts
    shape: FewShape | GemmShape | None = None,  # by default chosen by rule
) -> torch.Tensor:  # [rows, columns]
    rows = x.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, codes.columns, dtype=x.dtype, device=x.device)
    if shape is None:
        bands, tiles, _ = codes.words.shape
        shape = choose_shape(rows, bands, tiles, codes.step, codes.kind, x.device, may_split=counters is not None)
    if isinstance(shape, FewShape):
        launch_few(x, codes, bias, out, shape)
        return out
    # A counter belongs to a tile, so rows of several tiles take turns; later ones find the codes in the cache.
    at_once = MOST_ROWS_OF_A_TILE if shape.splits > 1 else rows
    for part, result in zip(x.split(at_once), out.split(at_once), strict=True):
        _launch_gemm(part, codes, bias, result, counters, shape)
    return out


def most_rows(zeros: bool, group: int) -> int:
    """Of a product here; with more, the library with the widened weight is faster."""
    return MOST_ROWS_OF_COSTLY if zeros or group == 32 else MOST_ROWS


def widened(codes: Codes, dtype: torch.dtype) -> torch.Tensor:  # [columns, inner]
    """The matrix as floats, at the speed of memory."""
    bands, tiles, _ = codes.words.shape
    out = torch.empty(codes.columns, codes.inner, dtype=dtype, device=codes.words.device)
    block = 16
    _widen_kernel[(ceil_div(tiles, block), bands)](
        codes.words, codes.scale, codes.zeros, out, tiles, codes.scale.shape[1],
        KIND=codes.kind, PARTS=codes.parts, GROUP=codes.group, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@lru_cache(maxsize=1024)
def choose_shape(
    rows: int,
    bands: int,
    tiles: int,  # of a band
    step: int,
    kind: str,
    device: torch.device,
    *,
    may_split: bool,
) -> FewShape | GemmShape:
    """What was fastest on an H200 (scripts/gpu_weight_only.py). block_k of a GemmShape counts tiles."""
    processors = multiprocessors(device)
    wide = bands * 16 >= 2 * 64 * processors  # enough to do without parts
    if tiles * TILE * parts_of(kind) <= FEW_INNER and rows <= (1 if wide else FEW_ROWS):
        # Many of the small steps of groups of 32 would want more registers than a wide matrix has.
        return FewShape(1, 4, 2 if wide and step == 1 else 4)
    if rows == 1 and kind == "int4" and step > 1 and not wide:  # a long sum: more warps share it
        return FewShape(1, 8, 2)
    block_n, num_warps = (128, 8) if wide and rows > 16 else (64, 4)
    blocks = ceil_div(bands * 16, block_n)
    at_once = 4 if rows <= 32 else 2  # tiles
    splits = 1
    if may_split and not wide:
        # Two or three programs per multiprocessor, each with a few turns at least.
        wanted = (3 if rows <= 32 else 2) * processors // blocks
        splits = 1 << (max(1, min(wanted, tiles // (4 * max(step, at_once)), MAX_SPLITS)).bit_length() - 1)
    crowded = blocks * splits > 2 * processors
    if rows <= 16 and not crowded:
        at_once = 8
    steps = next(size for size in (8, 4, 2, 1) if size * step <= max(step, at_once) and tiles // step % size == 0)
    # As long a pipeline as lets two or three programs share a multiprocessor.
    stage_bytes = step * steps * 32 * (block_n + parts_of(kind) * _rows_of_a_tile(rows))
    shared = min(SHARED_BYTES, room(device)) // (3 if crowded else 2)
    most = 3 if 16 < rows <= 32 else 4
    return GemmShape(block_n, step * steps, splits, num_warps, max(2, min(most, shared // stage_bytes)))


def _rows_of_a_tile(rows: int) -> int:
    return min(MOST_ROWS_OF_A_TILE, max(16, power_of_two(rows)))


def _launch_gemm(
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    shape: GemmShape,
) -> None:
    rows = x.shape[0]
    bands, tiles, _ = codes.words.shape
    block_m = _rows_of_a_tile(rows)
    row_blocks, blocks = ceil_div(rows, block_m), ceil_div(bands * 16, shape.block_n)
    assert tiles % shape.block_k == 0 and shape.block_k % codes.step == 0
    all_turns = tiles // shape.block_k
    assert row_blocks == 1 or shape.splits == 1
    turns = ceil_div(all_turns, shape.splits)
    splits = ceil_div(all_turns, turns)  # none of them without a turn
    partial = None
    if splits > 1:
        assert counters is not None and counters.numel() >= blocks
        partial = torch.empty(splits, blocks * shape.block_n * block_m, dtype=torch.float32, device=x.device)
    _gemm_kernel[(row_blocks, blocks, splits)](
        x, codes.words, codes.scale, codes.zeros, bias, out, partial, counters,
        rows, bands, tiles, codes.scale.shape[1], all_turns, turns, x.stride(0),
        KIND=codes.kind, PARTS=codes.parts, GROUP=codes.group, STEP=codes.step, STEPS=shape.block_k // codes.step,
        SPLITS=splits, BLOCK_M=block_m, BANDS=shape.block_n // 16,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["rows", "all_turns", "turns"])
def _gemm_kernel(
    x,  # [rows, inner]
    words,  # [bands, tiles, 256] int16
    scale,  # [bands, groups, 16]
    zeros,  # [bands, groups, 16] int8 or None
    bias,  # [16 * bands] or None
    out,  # [rows, 16 * bands]
    partial,  # [SPLITS, programs, BLOCK_N, BLOCK_M] float32 or None
    counters,  # [programs] int32 or None
    rows,
    bands,
    tiles,
    groups,
    all_turns,
    turns,  # of a split
    stride_x,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,  # tiles multiplied at once
    STEPS: tl.constexpr,  # of a turn
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BANDS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    WIDTH: tl.constexpr = STEP * 16 * PARTS  # columns of a step
    HALVES: tl.constexpr = 2 if GROUP == 32 and PARTS == 4 else 1
    SIMPLE: tl.constexpr = GROUP == 0 and PARTS == 2  # one sum, scaled at the end
    block = tl.program_id(1)
    split = tl.program_id(2)
    first_band = block * BANDS
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = split * turns * STEPS
    # Pairs of words, [bands, step, 128]; what lies outside is read again from the last band and not stored
    band = tl.minimum(first_band + axis(BANDS, 0, 3), bands - 1).to(tl.int64)
    # The loop's own loads cannot begin before x is there, so the words of its first steps are sent for here.
    line = begin * (STEP * 256) + axis(PREFETCHED_LINES, 2, 3) * LINE
    prefetch_constants(words + band * tiles * 256 + tl.minimum(line, tiles * 256 - 1), PDL)
    pairs = words.to(tl.pointer_type(tl.uint32), bitcast=True) + band * tiles * 128
    pairs += axis(STEP, 1, 3) * 128 + axis(128, 2, 3)
    # [t, g, bands, high]: the same for all t, because a lane has two columns of the result
    s_band = tl.minimum(first_band + lane_axis(BANDS, 2, 4), bands - 1).to(tl.int64)
    s_at = s_band * groups * 16 + lane_axis(4, 0, 4) * 0 + lane_axis(8, 1, 4) * 2 + lane_axis(2, 3, 4)
    # Scales and zeros are loaded a step ahead: only operands of products does the compiler load early by itself.
    s = _of_groups(scale + s_at, begin, WIDTH, GROUP, HALVES)
    z = s
    if zeros is not None:
        z = _of_groups(zeros + s_at, begin, WIDTH, GROUP, HALVES)
    wait_for_previous(PDL)
    inside = (row < rows)[None, :]
    inputs = x + row.to(tl.int64)[None, :] * stride_x + tl.arange(0, WIDTH // HALVES)[:, None]
    last = all_turns * STEPS - 1
    if SIMPLE:
        acc = tl.zeros([BANDS * 16, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([4, 8, BANDS, 2, BLOCK_M // 8, 2], tl.float32)
    for turn in range(split * turns, tl.minimum(split * turns + turns, all_turns)):
        for i in tl.static_range(STEPS):
            step = turn * STEPS + i
            w = tl.load(pairs + step * (STEP * 128))
            at = inputs + step * WIDTH
            if not SIMPLE:
                after = tl.minimum(step + 1, last)
                next_s = _of_groups(scale + s_at, after, WIDTH, GROUP, HALVES)
                next_z = next_s
                if zeros is not None:
                    next_z = _of_groups(zeros + s_at, after, WIDTH, GROUP, HALVES)
            v = tl.load(at, mask=inside, other=0.0)
            if SIMPLE:
                acc = tl.dot(_matrix(_all_parts(w, KIND, x.dtype.element_ty)), v, acc)
            elif HALVES == 2:
                low, high = unpack(w, 0, KIND, x.dtype.element_ty), unpack(w, 1, KIND, x.dtype.element_ty)
                acc += _scaled(_matrix(tl.join(low, high)), v, s[0], z[0], zeros is not None)
                v = tl.load(at + 32, mask=inside, other=0.0)
                low, high = unpack(w, 2, KIND, x.dtype.element_ty), unpack(w, 3, KIND, x.dtype.element_ty)
                acc += _scaled(_matrix(tl.join(low, high)), v, s[1], z[1], zeros is not None)
            else:
                acc += _scaled(_matrix(_all_parts(w, KIND, x.dtype.element_ty)), v, s[0], z[0], zeros is not None)
            if not SIMPLE:
                s = next_s
                z = next_z
    if SIMPLE:
        acc = _view(acc) * s[0]
    acc = acc.permute(2, 3, 1, 4, 0, 5).reshape([BANDS * 16, BLOCK_M])

    column = first_band * 16 + tl.arange(0, BANDS * 16)
    finish_tile(acc, bias, None, None, out, row, column, rows, bands * 16, partial, counters, block, split, SPLITS)


@triton.jit
def _of_groups(pointers, step, WIDTH: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr):
    """Scales or zeros of both halves of a step, as [t, g, bands, high, 1, 1] in float32."""
    if GROUP == 0:
        found = tl.load(pointers)
        other = found
    else:
        found = tl.load(pointers + step * WIDTH // GROUP * 16)
        other = found
        if HALVES == 2:
            other = tl.load(pointers + (step * WIDTH + 32) // GROUP * 16)
    found = tl.expand_dims(tl.expand_dims(in_order(found, 4).to(tl.float32), 4), 5)
    other = tl.expand_dims(tl.expand_dims(in_order(other, 4).to(tl.float32), 4), 5)
    return found, other


@triton.jit
def _all_parts(pairs, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """[bands, step, 128, 2, 2] or, with four parts, [bands, step, 128, 2, 2, 2]: parts are last."""
    a, b = unpack(pairs, 0, KIND, DTYPE), unpack(pairs, 1, KIND, DTYPE)
    if KIND == "int4":
        c, d = unpack(pairs, 2, KIND, DTYPE), unpack(pairs, 3, KIND, DTYPE)
        return tl.join(tl.join(a, c), tl.join(b, d))
    else:
        return tl.join(a, b)


@triton.jit
def _matrix(parts):
    """Parts of tiles, [bands, step, 128, 2, parts], as [16 * bands, columns]."""
    BANDS: tl.constexpr = parts.shape[0]
    STEP: tl.constexpr = parts.shape[1]
    COLUMNS: tl.constexpr = parts.numel // (BANDS * 16)
    parts = parts.reshape([BANDS, STEP, 8, 4, 2, 2, 2, COLUMNS // (STEP * 16)])  # ..., g, t, k_high, high, k_low, part
    return parts.permute(0, 5, 2, 1, 7, 4, 3, 6).reshape([BANDS * 16, COLUMNS])


@triton.jit
def _scaled(w, value, scale, zero, ZEROS: tl.constexpr):
    part = _view(tl.dot(w, value))
    if ZEROS:
        # Every row of this product is the sum of the inputs, where it is needed; the tensor cores have time for it.
        part -= zero * _view(tl.dot(tl.full(w.shape, 1.0, w.dtype), value))
    return part * scale


@triton.jit
def _view(part):
    """A matrix of the tensor cores as [t, g, bands, high, eights, two]."""
    part = part.reshape([part.shape[0] // 16, 2, 8, part.shape[1] // 8, 4, 2])
    return part.permute(4, 2, 0, 1, 3, 5)


@quick_launch
@triton.jit
def _widen_kernel(
    words,  # [bands, tiles, 256] int16
    scale,  # [bands, groups, 16]
    zeros,  # [bands, groups, 16] int8 or None
    out,  # [16 * bands, 16 * PARTS * tiles]
    tiles,
    groups,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # tiles
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    band = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * BLOCK + axis(BLOCK, 1, 3)
    pairs = words.to(tl.pointer_type(tl.uint32), bitcast=True) + (band * tiles + tile) * 128 + axis(128, 2, 3)
    w = tl.load(pairs, mask=tile < tiles)
    # By runs of 32 columns, which share a scale in every form.
    RUNS: tl.constexpr = BLOCK * PARTS // 2
    value = _matrix(_all_parts(w, KIND, tl.float16)).reshape([16, RUNS, 32]).to(tl.float32)
    row = axis(16, 0, 3)
    first = (tl.program_id(0) * RUNS + axis(RUNS, 1, 3)) * 32
    inside = first < tiles * (16 * PARTS)
    of_group = band * groups * 16 + row % 8 * 2 + row // 8
    if GROUP != 0:
        of_group += first // GROUP * 16
    if zeros is not None:
        value -= tl.load(zeros + of_group, mask=inside, other=0).to(tl.float32)
    value *= tl.load(scale + of_group, mask=inside, other=0.0)
    wait_for_previous(PDL)  # whoever read what lies here now has ended
    place = (band * 16 + row) * (tiles * 16 * PARTS) + first + axis(32, 2, 3)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
