"""Up to 16 rows times weights of four or eight bits: every warp streams tiles from memory right into the tensor cores.

A program has a few bands of 16 weight rows. Its warps take turns along the inner dimension, each with several tiles
on their way, and their sums meet once at the end. Tensors have one dimension for each thing that a lane, a warp or a
register stands for, in the order in which the compiler deals dimensions out: the last to a lane's vector, then from the
first on to lanes, warps and registers. So they are what the `mma` instruction takes when they become matrices, and
neither words, inputs nor scales pass through shared memory.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.gemm.weight_codes import Codes, axis, in_order, lane_axis, unpack
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous

REGISTERS = 1 << 16  # of a multiprocessor


@dataclass(frozen=True)
class FewShape:
    """How few rows are multiplied: bands of 16 weight rows a program, its warps, and steps on their way in each."""

    bands: int
    num_warps: int
    depth: int
    registers: int | None = None  # of a thread at most; None: by rule


def launch_few(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, shape: FewShape) -> None:
    bands, tiles, _ = codes.words.shape
    programs = ceil_div(bands, shape.bands)
    _few_kernel[(programs,)](
        x, codes.words, codes.scale, codes.zeros, bias, out, x.shape[0], bands, x.stride(0),
        TILES=tiles, KIND=codes.kind, PARTS=codes.parts, GROUP=codes.group, STEP=codes.step, BANDS=shape.bands,
        WARPS=shape.num_warps, DEPTH=shape.depth, EIGHTS=ceil_div(x.shape[0], 8), num_warps=shape.num_warps,
        maxnreg=shape.registers or _registers(programs, shape.num_warps, x.device),
    )  # fmt: skip


def _registers(programs: int, num_warps: int, device: torch.device) -> int:
    """The most that a thread may have so that all programs run at once; where that is too few, enough for any shape."""
    at_once = ceil_div(programs, multiprocessors(device))
    most = REGISTERS // (at_once * num_warps * 32) // 8 * 8
    return min(most, 248) if most >= 64 else 128


@quick_launch
@triton.jit(do_not_specialize=["rows"])
def _few_kernel(
    x,  # [rows, inner]
    words,  # [bands, TILES, 256] int16
    scale,  # [bands, groups, 16]
    zeros,  # [bands, groups, 16] int8 or None
    bias,  # [16 * bands] or None
    out,  # [rows, 16 * bands]
    rows,
    bands,
    stride_x,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,  # tiles multiplied at once
    BANDS: tl.constexpr,  # of a program
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    EIGHTS: tl.constexpr,  # of rows
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    WIDTH: tl.constexpr = STEP * 16 * PARTS  # columns of a step
    STEPS: tl.constexpr = TILES // STEP
    AT_ONCE: tl.constexpr = WARPS * DEPTH
    TURNS: tl.constexpr = (STEPS + AT_ONCE - 1) // AT_ONCE
    EVEN: tl.constexpr = STEPS % AT_ONCE == 0
    GROUPS: tl.constexpr = 1 if GROUP == 0 else TILES * 16 * PARTS // GROUP
    # Steps whose halves have scales of their own are two sums, one after the other.
    HALVES: tl.constexpr = 2 if GROUP == 32 and PARTS == 4 else 1
    first_band = tl.program_id(0) * BANDS

    # Pairs of words: [warps, depth, step, bands, 128]
    w_step = lane_axis(WARPS, 0, 5) + lane_axis(DEPTH, 1, 5) * WARPS
    w_band = tl.minimum(first_band + lane_axis(BANDS, 3, 5), bands - 1).to(tl.int64)
    w_at = words.to(tl.pointer_type(tl.uint32), bitcast=True) + w_band * (TILES * 128)
    w_at += (w_step * STEP + lane_axis(STEP, 2, 5)) * 128 + lane_axis(128, 4, 5)
    # [t, g, warps, depth, bands, high]: the same for all t, because a lane has two columns of the result
    s_step = lane_axis(WARPS, 2, 6) + lane_axis(DEPTH, 3, 6) * WARPS
    s_band = tl.minimum(first_band + lane_axis(BANDS, 4, 6), bands - 1).to(tl.int64)
    s_at = s_band * (GROUPS * 16) + lane_axis(4, 0, 6) * 0 + lane_axis(8, 1, 6) * 2 + lane_axis(2, 5, 6)
    # Constants: the first are on their way while the previous kernel still makes x, others while one turn is computed.
    w = _words(w_at, w_step, 0, STEP, STEPS, EVEN)
    s = _of_groups(scale + s_at, s_step, 0, WIDTH, GROUP, HALVES, STEPS)
    z = s
    if zeros is not None:
        z = _of_groups(zeros + s_at, s_step, 0, WIDTH, GROUP, HALVES, STEPS)
    wait_for_previous(PDL)

    # [t, row, warps, depth, step, part, k_high, eights, k_low], of two parts of the words
    x_step = lane_axis(WARPS, 2, 9) + lane_axis(DEPTH, 3, 9) * WARPS
    x_row = tl.minimum(lane_axis(8, 1, 9) + lane_axis(EIGHTS, 7, 9) * 8, rows - 1).to(tl.int64)
    x_column = lane_axis(4, 0, 9) * 2 + lane_axis(STEP, 4, 9) * (16 * PARTS) + lane_axis(2, 5, 9) * 16
    x_column += lane_axis(2, 6, 9) * 8 + lane_axis(2, 8, 9)
    x_at = x + x_row * stride_x + x_step * WIDTH + x_column
    acc = tl.zeros([4, 8, WARPS, DEPTH, BANDS, 2, EIGHTS, 2], tl.float32)
    # One stage: the compiler's own pipeline would take the inputs through shared memory, piece by piece.
    # A turn that is left over after pairs would have the words in another layout than the loop.
    for turn in tl.range(TURNS, num_stages=1, loop_unroll_factor=2 - TURNS % 2):
        after = (turn + 1) * AT_ONCE
        next_w = _words(w_at, w_step, after, STEP, STEPS, False)
        next_s = _of_groups(scale + s_at, s_step, after, WIDTH, GROUP, HALVES, STEPS)
        next_z = next_s
        if zeros is not None:
            next_z = _of_groups(zeros + s_at, s_step, after, WIDTH, GROUP, HALVES, STEPS)
        inside = x_step + turn * AT_ONCE < STEPS
        inputs = x_at + turn * AT_ONCE * WIDTH
        v = _inputs(inputs, inside, EVEN)
        part = _multiply(_two_parts(w, 0, KIND, x.dtype.element_ty), v, None)
        if zeros is not None:
            total = _sums(v, None)
        if PARTS == 4:
            if HALVES == 2:
                value = _view(part, BANDS, WARPS)
                if zeros is not None:
                    value -= z[0] * _view(total, 1, WARPS)
                    total = None
                acc += value * s[0]
                part = None
            v = _inputs(inputs + 32, inside, EVEN)
            part = _multiply(_two_parts(w, 2, KIND, x.dtype.element_ty), v, part)
            if zeros is not None:
                total = _sums(v, total)
        value = _view(part, BANDS, WARPS)
        if zeros is not None:
            value -= z[1] * _view(total, 1, WARPS)
        acc += value * s[1]
        w = next_w
        s = next_s
        z = next_z

    total = tl.sum(tl.sum(acc, 3), 2)  # [t, g, bands, high, eights, two]
    column = (first_band + axis(BANDS, 2, 6)) * 16 + axis(2, 3, 6) * 8 + axis(8, 1, 6)
    row = axis(EIGHTS, 4, 6) * 8 + axis(4, 0, 6) * 2 + axis(2, 5, 6)
    stored = column < bands * 16
    if bias is not None:
        total += tl.load(bias + column, mask=stored, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * (bands * 16) + column
    tl.store(out + place, total.to(out.dtype.element_ty), mask=stored & (row < rows))


@triton.jit
def _words(pointers, step, first, STEP: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr):
    """What lies outside is anything: it is multiplied with zeros, or not at all."""
    if EVEN:
        return in_order(tl.load(pointers + first * (STEP * 128)), 5)
    return in_order(tl.load(pointers + first * (STEP * 128), mask=step + first < STEPS), 5)


@triton.jit
def _of_groups(
    pointers,
    step,
    first,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Scales or zeros of both halves of the steps, as [t, g, warps, depth, bands, high, 1, 1] in float32."""
    if GROUP == 0:
        found = tl.load(pointers + step * 0)
        other = found
    else:
        inside = step + first < STEPS
        found = tl.load(pointers + (step + first) * WIDTH // GROUP * 16, mask=inside, other=0)
        other = found
        if HALVES == 2:
            other = tl.load(pointers + ((step + first) * WIDTH + 32) // GROUP * 16, mask=inside, other=0)
    found = tl.expand_dims(tl.expand_dims(in_order(found, 6).to(tl.float32), 6), 7)
    other = tl.expand_dims(tl.expand_dims(in_order(other, 6).to(tl.float32), 6), 7)
    return found, other


@triton.jit
def _inputs(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        return in_order(tl.load(pointers), 9)
    return in_order(tl.load(pointers, mask=inside, other=0.0), 9)


@triton.jit
def _two_parts(pairs, j: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    return tl.join(unpack(pairs, j, KIND, DTYPE), unpack(pairs, j + 1, KIND, DTYPE))


@triton.jit
def _multiply(w, value, acc):
    """Tiles [warps, depth, step, bands, 128, k_low, part] times inputs: [16 * bands, 8 * eights] per depth and warp.

    A lane's words follow one another along the inner dimension, as the compiler wants it of numbers that were made of
    larger ones; the inputs are in the same order.
    """
    WARPS: tl.constexpr = w.shape[0]
    DEPTH: tl.constexpr = w.shape[1]
    STEP: tl.constexpr = w.shape[2]
    BANDS: tl.constexpr = w.shape[3]
    w = w.reshape([WARPS, DEPTH, STEP, BANDS, 8, 4, 2, 2, 2, 2])  # ..., g, t, k_high, high, k_low, part
    w = w.permute(1, 0, 3, 7, 4, 2, 9, 5, 6, 8).reshape([DEPTH * WARPS, BANDS * 16, STEP * 32])
    value = value.permute(3, 2, 4, 5, 0, 6, 8, 7, 1).reshape([DEPTH * WARPS, STEP * 32, value.shape[7] * 8])
    if acc is None:
        return tl.dot(w, value)
    else:
        return tl.dot(w, value, acc)


@triton.jit
def _sums(value, acc):
    """Every row of this product with ones is the sum of the inputs, where it is needed; the tensor cores have time."""
    MATRICES: tl.constexpr = value.shape[2] * value.shape[3]
    COLUMNS: tl.constexpr = value.shape[4] * 32
    ones = tl.full([MATRICES, 16, COLUMNS], 1.0, value.dtype)
    value = value.permute(3, 2, 4, 5, 6, 0, 8, 7, 1).reshape([MATRICES, COLUMNS, value.shape[7] * 8])
    if acc is None:
        return tl.dot(ones, value)
    else:
        return tl.dot(ones, value, acc)


@triton.jit
def _view(part, BANDS: tl.constexpr, WARPS: tl.constexpr):
    """Matrices of the tensor cores as [t, g, warps, depth, bands, high, eights, two]."""
    part = part.reshape([part.shape[0] // WARPS, WARPS, BANDS, 2, 8, part.shape[2] // 8, 4, 2])
    return part.permute(6, 4, 1, 0, 2, 3, 5, 7)
