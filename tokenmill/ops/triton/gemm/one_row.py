"""One row times weights of four bits, for Hopper: codes stream through shared memory right into the tensor cores.

A step that makes one token is bound by the bytes of its weights, so they must never stop coming. Programs stay: each
takes band after band, and a ring of stages is always on its way. The first stages are sent for before the previous
kernel has ended, which fills the memory's time while norms, RoPE and attention of a single row run. And what is left
between two products is done inside of them: the residual is added and normed where its row is read (`Unnormed`), and
gate and up meet before they are written (`act`).

A tile goes through one block of instructions (`tile_text`): four words
of a lane become the sixteen operands of four `mma`. weight_codes.py says how words lie.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.config import power_of_two
from tokenmill.ops.triton.gemm.weight_codes import TILE, Codes, int4_lines
from tokenmill.ops.triton.gluon_names import copy_async, reinterpret, thread_barrier
from tokenmill.ops.triton.launch import ceil_div, quick_launch
from tokenmill.ops.triton.moe.hopper import activate
from tokenmill.ops.types import Unnormed

TILE_COLUMNS = gl.constexpr(64)  # of codes of four bits
TILE_BYTES = 512 + 32  # of codes and scales
SHARED_BYTES = 227 << 10  # of a multiprocessor
TILES = (8, 4)  # of a warp in a stage: with fewer, threads wait for each other more than they multiply


@dataclass(frozen=True)
class OneShape:
    """How a row is multiplied: programs of a multiprocessor, their warps, tiles of each in a stage, and stages."""

    programs: int
    num_warps: int
    tiles: int
    stages: int


@lru_cache(maxsize=256)
def choose_one_shape(bands: int, tiles: int, device: torch.device) -> OneShape:
    """What was fastest on an H200, in a model's steps (scripts/gpu_one_row.py shows products alone).

    No more programs must fit on a multiprocessor than are wanted there. The next kernel starts as places become free:
    with places to spare its programs gather on some multiprocessors, and all wait for these. So stages fill the shared
    memory, unless registers are the limit already and there is no work for more stages.
    """
    processors = multiprocessors(device)
    each = next(each for each in TILES if tiles % (4 * each) == 0)
    programs = 2 if bands <= 2 * processors else 3
    turns = tiles // (4 * each) * ceil_div(bands, programs * processors)
    if programs == 3 and each == max(TILES) and turns == 2:
        return OneShape(programs, 4, each, 2)
    free = SHARED_BYTES // (programs + 1) - 4 * power_of_two(tiles * 32)
    return OneShape(programs, 4, each, max(2, free // (4 * each * TILE_BYTES) + 1))


def one_row_gemm(
    x: torch.Tensor | Unnormed,  # [1, inner]
    codes: Codes,
    bias: torch.Tensor | None = None,  # [columns]
    act: str = "",  # "silu" or "gelu_tanh": the first half of the columns gates the second
    shape: OneShape | None = None,  # by default chosen by rule
) -> torch.Tensor:  # [1, columns], or half as many
    bands, tiles, _ = codes.words.shape
    device = codes.words.device
    shape = shape or choose_one_shape(bands, tiles, device)
    units = bands // 2 if act else bands
    given = x.update if isinstance(x, Unnormed) else x
    assert given.shape[0] == 1 and given.stride(1) == 1 and (not act or bands % 2 == 0)
    assert not isinstance(x, Unnormed) or x.residual.dtype == x.weight.dtype == given.dtype  # read as if they were
    assert tiles % (shape.num_warps * shape.tiles) == 0
    out = torch.empty(1, units * TILE, dtype=given.dtype, device=device)
    normed = (x.residual, x.weight, x.total) if isinstance(x, Unnormed) else (None, None, None)
    each = codes.group // 64
    _kernel[(min(units, shape.programs * multiprocessors(device)),)](
        given, *normed, codes.words, codes.scale, bias, out, x.eps if isinstance(x, Unnormed) else 0.0, units,
        TILES=tiles, X_WORDS=power_of_two(tiles * 32), GROUPS=shape.tiles // each, EACH=each, WARPS=shape.num_warps,
        STAGES=shape.stages, ACT=act, num_warps=shape.num_warps, maxnreg=_registers(shape),
    )  # fmt: skip
    return out


def _registers(shape: OneShape) -> int:
    """Of a thread at most, so that all programs that are wanted on a multiprocessor fit."""
    return min(248, (1 << 16) // (shape.programs * shape.num_warps * 32) // 8 * 8)


def tile_text(bf16: bool) -> str:
    """Words of a tile ($4-$7) and the inputs of its 64 columns ($8-$15) as a sum of 16 rows ($0-$3)."""
    kind = "bf16" if bf16 else "f16"
    lines = [".reg .b32 a, b, q;", *(f".reg .b32 w{j};" for j in range(4)), *(f".reg .f32 s{j};" for j in range(4))]
    lines += [f"mov.f32 s{j}, 0f00000000;" for j in range(4)]
    sums = "{s0, s1, s2, s3}"
    for part in range(4):
        for j in range(4):
            lines += [f"mov.b32 q, ${4 + j};", *int4_lines(bf16, part), f"mov.b32 w{j}, a;"]
        pair = f"{{${8 + 2 * part}, ${9 + 2 * part}}}"
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        lines.append(f"{mma} {sums}, {{w0, w1, w2, w3}}, {pair}, {sums};")
    lines += [f"mov.f32 ${j}, s{j};" for j in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


TEXTS = gl.constexpr({bf16: tile_text(bf16) for bf16 in (True, False)})
REGISTERS = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 12))


@gluon.constexpr_function
def _text(bf16):
    return TEXTS.value[bf16]


@gluon.constexpr_function
def _along(layout, at, rank):
    """The layout of one dimension of tensors with this layout."""
    for i in reversed(range(rank)):
        if i != at:
            layout = gl.SliceLayout(i, layout)
    return layout


@gluon.jit
def _axis(size: gl.constexpr, at: gl.constexpr, rank: gl.constexpr, layout: gl.constexpr):
    """0, 1, ... along dimension `at` of a tensor of this rank and layout, which is 1 in all others."""
    found = gl.arange(0, size, _along(layout, at, rank))
    for i in gl.static_range(rank):
        if i != at:
            found = gl.expand_dims(found, i)
    return found


@quick_launch
@gluon.jit
def _kernel(
    x,  # [inner]
    residual,  # [inner] or None: x is multiplied as it is
    gain,  # [inner] or None
    total,  # [inner] or None
    words,  # [bands, TILES, 256] int16
    scale,  # [bands, groups, 16]
    bias,  # [16 * bands] or None
    out,  # [16 * units]
    eps,
    units,  # bands, or pairs of them
    TILES: gl.constexpr,
    X_WORDS: gl.constexpr,  # pairs of inputs, up to a power of two
    GROUPS: gl.constexpr,  # of a warp's tiles in a stage
    EACH: gl.constexpr,  # tiles of a group
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr = False,
):
    if PDL:
        gdc_launch_dependents()
    CHUNK: gl.constexpr = WARPS * GROUPS * EACH  # tiles of a stage
    SCALES: gl.constexpr = WARPS * GROUPS * 16
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # warps, groups, tiles, g, t, words of a lane
    lanes: gl.constexpr = gl.BlockedLayout(
        [1, GROUPS, EACH, 1, 1, 4], [1, 1, 1, 8, 4, 1], [WARPS, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ring = gl.allocate_shared_memory(gl.uint32, [STAGES, WARPS, GROUPS, EACH, 8, 4, 4], shared)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, SCALES], flat)
    inputs = gl.allocate_shared_memory(gl.uint32, [X_WORDS], flat)

    at = _axis(WARPS, 0, 6, lanes) * (GROUPS * EACH * 128) + _axis(GROUPS, 1, 6, lanes) * (EACH * 128)
    at += _axis(EACH, 2, 6, lanes) * 128 + _axis(8, 3, 6, lanes) * 16 + _axis(4, 4, 6, lanes) * 4
    at += _axis(4, 5, 6, lanes)
    words = words.to(gl.pointer_type(gl.uint32), bitcast=True) + at
    scale = scale + gl.arange(0, SCALES, line)
    for stage in gl.static_range(STAGES - 1):
        _send(stage, words, scale, ring, scales, units, TILES, CHUNK, SCALES, STAGES, ACT)
    if PDL:
        gdc_wait()
    _read_inputs(x, residual, gain, total, eps, inputs, line, TILES, X_WORDS, CHUNK)

    step = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        result, step = _band(
            words, scale, ring, scales, inputs, lanes, step, units, x.dtype.element_ty,
            TILES, X_WORDS, GROUPS, EACH, WARPS, STAGES, ACT,
        )  # fmt: skip
        result = _with_bias(result, bias, unit)
        if ACT != "":
            up, step = _band(
                words, scale, ring, scales, inputs, lanes, step, units, x.dtype.element_ty,
                TILES, X_WORDS, GROUPS, EACH, WARPS, STAGES, ACT,
            )  # fmt: skip
            up = _with_bias(up, bias, units + unit)
            result = _rounded(activate(result, ACT == "silu"), out) * _rounded(up, out)
        kept: gl.constexpr = result.type.layout
        column, only = _places(kept, unit)
        gl.store(out + column, result.to(out.dtype.element_ty), mask=only)


@gluon.jit
def _rounded(value, out):
    """As separate ops would store it."""
    return value.to(out.dtype.element_ty).to(gl.float32)


@gluon.jit
def _send(
    step, words, scale, ring, scales, units,
    TILES: gl.constexpr, CHUNK: gl.constexpr, SCALES: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Start the copies of this program's step, if there is one; an empty group keeps the count otherwise."""
    TURNS: gl.constexpr = TILES // CHUNK
    number, turn = step // TURNS, step % TURNS
    unit = gl.program_id(0) + (number // 2 if ACT != "" else number) * gl.num_programs(0)
    band = unit + (number % 2 * units if ACT != "" else 0)
    place = (band * TURNS + turn).to(gl.int64)
    inside = unit < units
    copy_async(ring.index(step % STAGES), words + place * (CHUNK * 128), mask=inside)
    copy_async(scales.index(step % STAGES), scale + place * SCALES, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _read_inputs(
    x, residual, gain, total, eps, inputs, line: gl.constexpr,
    TILES: gl.constexpr, X_WORDS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """The row, normed where that is wanted, into shared memory in the order in which lanes take it."""
    dtype: gl.constexpr = x.dtype.element_ty
    i = gl.arange(0, X_WORDS, line)
    # [turns, halves of the parts, tiles, t, parts, k_high] -> pairs of columns
    inside = i % (CHUNK * 32)
    tile = i // (CHUNK * 32) * CHUNK + inside % (CHUNK * 16) // 16
    part = inside // (CHUNK * 16) * 2 + i % 4 // 2
    pair = tile * 32 + part * 8 + i % 2 * 4 + i // 4 % 4
    there = tile < TILES
    value = gl.load(x.to(gl.pointer_type(gl.uint32), bitcast=True) + pair, mask=there, other=0)
    if residual is not None:
        before = gl.load(residual.to(gl.pointer_type(gl.uint32), bitcast=True) + pair, mask=there, other=0)
        factor = gl.load(gain.to(gl.pointer_type(gl.uint32), bitcast=True) + pair, mask=there, other=0)
        low = (_low(value, dtype) + _low(before, dtype)).to(dtype)
        high = (_high(value, dtype) + _high(before, dtype)).to(dtype)
        if gl.program_id(0) == 0:
            gl.store(total.to(gl.pointer_type(gl.uint32), bitcast=True) + pair, _pair(low, high), mask=there)
        low, high = low.to(gl.float32), high.to(gl.float32)  # the norm is of the sum as stored
        inverse = gl.rsqrt(gl.sum(low * low + high * high, 0) / (TILES * TILE_COLUMNS) + eps)
        low = low * inverse * _low(factor, gain.dtype.element_ty)
        high = high * inverse * _high(factor, gain.dtype.element_ty)
        value = _pair(low.to(dtype), high.to(dtype))
    inputs.store(value)


@gluon.jit
def _low(pair, dtype: gl.constexpr):
    return pair.to(gl.uint16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _high(pair, dtype: gl.constexpr):
    return (pair >> 16).to(gl.uint16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _pair(low, high):
    return low.to(gl.uint16, bitcast=True).to(gl.uint32) | (high.to(gl.uint16, bitcast=True).to(gl.uint32) << 16)


@gluon.jit
def _band(
    words, scale, ring, scales, inputs, lanes: gl.constexpr, step, units, dtype: gl.constexpr,
    TILES: gl.constexpr, X_WORDS: gl.constexpr, GROUPS: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """The sums of the program's next 16 rows, [g, t, high, two]: the same for all of t and two."""
    CHUNK: gl.constexpr = WARPS * GROUPS * EACH
    wide: gl.constexpr = gl.BlockedLayout(
        [1, GROUPS, EACH, 1, 1, 2, 2], [1, 1, 1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
    )
    text: gl.constexpr = _text(dtype == gl.bfloat16)
    acc = gl.zeros([WARPS, GROUPS, EACH, 8, 4, 2, 2], gl.float32, wide)
    halves = reinterpret(
        inputs,
        gl.uint32,
        [X_WORDS // (CHUNK * 16), WARPS, GROUPS, EACH, 1, 4, 4],
        gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0]),
    )
    for turn in range(TILES // CHUNK):
        async_copy.wait_group(STAGES - 2)
        thread_barrier()  # what others copied is there, and the stage before this one has been read by all
        codes = ring.index(step % STAGES).load(lanes)
        factor = scales.index(step % STAGES).reshape([WARPS, GROUPS, 1, 8, 1, 2, 1]).load(wide)
        _send(step + STAGES - 1, words, scale, ring, scales, units, TILES, CHUNK, WARPS * GROUPS * 16, STAGES, ACT)
        low = halves.index(2 * turn).load(lanes)
        high = halves.index(2 * turn + 1).load(lanes)
        codes, low = gl.broadcast(codes, low)
        codes, high = gl.broadcast(codes, high)
        part = gl.inline_asm_elementwise(text, REGISTERS, [codes, low, high], dtype=gl.float32, is_pure=True, pack=4)
        part = gl.convert_layout(part.reshape([WARPS, GROUPS, EACH, 8, 4, 2, 2]), wide, assert_trivial=True)
        acc += part * factor
        step += 1
    return gl.sum(gl.sum(gl.sum(acc, 2), 1), 0), step


@gluon.jit
def _places(layout: gl.constexpr, band):
    """Columns of the result that [g, t, high, two] stand for, and which of them to use."""
    column = band * 16 + _axis(2, 2, 4, layout) * 8 + _axis(8, 0, 4, layout)
    other = _axis(4, 1, 4, layout) + _axis(2, 3, 4, layout)
    return column + other * 0, column * 0 + other == 0


@gluon.jit
def _with_bias(result, bias, band):
    if bias is not None:
        kept: gl.constexpr = result.type.layout
        column, _ = _places(kept, band)
        result += gl.load(bias + column).to(gl.float32)
    return result
