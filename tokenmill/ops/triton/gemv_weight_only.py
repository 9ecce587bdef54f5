"""One row times weights of four or eight bits: a sum per weight row on the ordinary cores, at the speed of memory."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.gemm_small import GemvShape
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.weight_codes import Codes, of_groups, pair_offset, wide_pair


def launch_gemv(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, shape: GemvShape
) -> None:
    columns, width = codes.words.shape
    _gemv_kernel[(ceil_div(columns, shape.block_n),)](
        x, codes.words, codes.scale, codes.zeros, bias, out, columns, width // 2, codes.scale.shape[1],
        KIND=codes.kind, PARTS=codes.parts, RUN=codes.run, GROUP=codes.group, BLOCK_N=shape.block_n,
        CHUNKS=shape.block_k // 4, EVEN_N=columns % shape.block_n == 0, num_warps=shape.num_warps,
    )  # fmt: skip


@quick_launch
@triton.jit
def _gemv_kernel(
    x,  # [1, inner]
    words,  # [columns, 2 * pairs] int16
    scale,  # [columns, groups]
    zeros,  # [columns, groups] int8 or None
    bias,  # [columns] or None
    out,  # [1, columns]
    columns,
    pairs,  # pairs of words in a row
    groups,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,  # of four pairs each, 16 bytes: what a thread loads at once
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (column if EVEN_N else tl.minimum(column, columns - 1)).to(tl.int64)
    # The first dimension goes to the threads, so that each has its columns of all BLOCK_N rows.
    chunk = tl.arange(0, CHUNKS) * 4
    four = tl.arange(0, 4)[None, None, :]
    mine = words.to(tl.pointer_type(tl.uint32), bitcast=True) + (row * pairs)[None, :, None] + four
    inputs = x.to(tl.pointer_type(tl.uint32), bitcast=True)
    scales = (scale + row * groups)[None, :]
    # Constants: the first are on their way while the previous kernel still makes x, others while one turn is computed.
    w = _pairs(mine, chunk, pairs)  # [CHUNKS, BLOCK_N, 4]
    block = tl.minimum(chunk, pairs - 4) // (RUN // 2)  # [CHUNKS]: of PARTS * RUN columns
    s = of_groups(scales, block[:, None], PARTS, RUN, GROUP)  # of [CHUNKS, BLOCK_N] each
    if zeros is not None:
        z = of_groups((zeros + row * groups)[None, :], block[:, None], PARTS, RUN, GROUP)
    if bias is not None:
        row_bias = tl.load(bias + row).to(tl.float32)
    wait_for_previous(PDL)
    acc = tl.zeros([CHUNKS, BLOCK_N], tl.float32)
    for start in range(0, pairs, CHUNKS * 4):
        at = start + chunk
        inside = (at < pairs)[:, None, None]
        x_place = (block * (PARTS * RUN // 2) + at % (RUN // 2))[:, None, None] + four
        after = at + CHUNKS * 4
        next_w = _pairs(mine, after, pairs)
        block = tl.minimum(after, pairs - 4) // (RUN // 2)
        next_s = s
        if GROUP != 0:
            next_s = of_groups(scales, block[:, None], PARTS, RUN, GROUP)
        for j in tl.static_range(PARTS):
            both = tl.load(inputs + x_place + j * (RUN // 2), mask=inside, other=0)  # [CHUNKS, 1, 4]
            x_low, x_high = _halves(both, x.dtype.element_ty)
            low, high = wide_pair(w, j, KIND)
            part = tl.sum(low * x_low + high * x_high, 2)  # [CHUNKS, BLOCK_N]
            if KIND == "int4":
                offset = pair_offset(j, KIND)
                if zeros is not None:
                    offset += z[j]
                part -= offset * tl.sum(x_low + x_high, 2)
            if GROUP != 0:
                part *= s[j]
            acc += part
        w = next_w
        s = next_s
        if zeros is not None:
            z = of_groups((zeros + row * groups)[None, :], block[:, None], PARTS, RUN, GROUP)
    total = tl.sum(acc, 0)
    if GROUP == 0:
        total *= tl.load(scale + row)
    if bias is not None:
        total += row_bias
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _pairs(pointers, at, pairs):  # [CHUNKS, BLOCK_N, 4]
    return tl.load(pointers + at[:, None, None], mask=(at < pairs)[:, None, None], other=0)


@triton.jit
def _halves(both, dtype: tl.constexpr):
    """Two 16-bit floats of a 32-bit word, in float32."""
    if dtype == tl.bfloat16:
        return (both << 16).to(tl.float32, bitcast=True), (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    low = (both & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)
