"""Attention of gathered chunks for Hopper: one warp loads tiles, two warpgroups compute, each on half the queries."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmill.ops.triton.gluon_names import release, thread_barrier, tma_load
from tokenmill.ops.triton.launch import quick_launch


@quick_launch
@gluon.jit(do_not_specialize=["keys", "items"], do_not_specialize_on_alignment=["tiles"])
def hopper_kernel(
    q,  # [tokens, heads, DIM]
    gathered,  # descriptor of [2 * kv_heads * keys, DIM_BLOCK], in tiles of [BLOCK_N, DIM_BLOCK]
    out,  # [tokens, heads, DIM]
    tiles,  # [tiles, 8]: first token, count, first position, first pair, where the row's keys are
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    kv_heads,
    keys,
    items,  # tiles x kv_heads, dealt to the programs to and fro
    score_scale,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    DIM_BLOCK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    kind: gl.constexpr = gathered.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DIM_BLOCK], kind)
    queries = gl.allocate_shared_memory(kind, [2, 64, DIM_BLOCK], q_layout)
    k_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, DIM_BLOCK], gathered.layout)
    v_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, DIM_BLOCK], gathered.layout)
    # For each stage: key tile is there, key tile is used up, value tile is there, value tile is used up.
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(4 * i), count=1)
        mbarrier.init(bars.index(4 * i + 1), count=2)
        mbarrier.init(bars.index(4 * i + 2), count=1)
        mbarrier.init(bars.index(4 * i + 3), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize([
        (_attend, (q, out, queries.index(0), k_tiles, v_tiles, bars, tiles, stride_q_token, stride_q_head,
                   stride_out_token, stride_out_head, kv_heads, items, score_scale,
                   0, GROUP, DIM, DIM_BLOCK, BLOCK_N, STAGES)),
        (_attend, (q, out, queries.index(1), k_tiles, v_tiles, bars, tiles, stride_q_token, stride_q_head,
                   stride_out_token, stride_out_head, kv_heads, items, score_scale,
                   64, GROUP, DIM, DIM_BLOCK, BLOCK_N, STAGES)),
        (_load, (gathered, k_tiles, v_tiles, bars, tiles, kv_heads, keys, items, GROUP, BLOCK_N, STAGES)),
    ], [4, 1], [240, 24])
    # fmt: on


@gluon.jit
def _item(tiles, kv_heads, turn, GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tile and kv head of this program's turn. The longest come first; even and odd turns run to and fro."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, lane, programs - 1 - lane)
    entry = tiles + item // kv_heads * 8
    first_token = gl.load(entry)
    count = gl.load(entry + 1)
    before = gl.load(entry + 2)
    first_pair = gl.load(entry + 3)
    place = gl.load(entry + 4)
    latest = before + gl.minimum((first_pair + 127) // GROUP, count - 1)
    blocks = latest // BLOCK_N + 1
    full = (before + first_pair // GROUP + 1) // BLOCK_N  # of them, seen by every query
    return item % kv_heads, first_token, count, before, first_pair, place, blocks, full


@gluon.jit
def _turns(items):
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    whole = items // programs
    left = items - whole * programs
    rank = gl.where(whole % 2 == 0, lane, programs - 1 - lane)
    return whole + (rank < left).to(gl.int32)


@gluon.jit
def _load(
    gathered, k_tiles, v_tiles, bars, tiles, kv_heads, keys, items,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for turn in range(_turns(items)):
        head, _, _, _, _, place, blocks, _ = _item(tiles, kv_heads, turn, GROUP, BLOCK_N)
        k_row = head * keys + place
        v_row = k_row + kv_heads * keys
        for i in range(blocks):
            start = (blocks - 1 - i) * BLOCK_N
            stage = step % STAGES
            parity = step // STAGES % 2 ^ 1
            bar = stage * 4
            mbarrier.wait(bars.index(bar + 1), parity)
            mbarrier.expect(bars.index(bar), gathered.block_type.nbytes)
            tma_load(gathered, [k_row + start, 0], bars.index(bar), k_tiles.index(stage))
            mbarrier.wait(bars.index(bar + 3), parity)
            mbarrier.expect(bars.index(bar + 2), gathered.block_type.nbytes)
            tma_load(gathered, [v_row + start, 0], bars.index(bar + 2), v_tiles.index(stage))
            step += 1


@gluon.jit
def _attend(
    q, out, queries, k_tiles, v_tiles, bars, tiles, stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    kv_heads, items, score_scale,
    HALF: gl.constexpr,  # where in the tile this warpgroup's pairs begin
    GROUP: gl.constexpr, DIM: gl.constexpr, DIM_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_BLOCK, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM_BLOCK, DIM_BLOCK // 8], [4, 1], [1, 0])
    step = 0
    for turn in range(_turns(items)):
        head, first_token, count, before, first_pair, _, blocks, full = _item(tiles, kv_heads, turn, GROUP, BLOCK_N)
        offsets, inside = _places(
            first_token, count, first_pair + HALF, head, stride_q_token, stride_q_head, GROUP, DIM, DIM_BLOCK,
            load_layout,
        )  # fmt: skip
        queries.store(gl.load(q + offsets, mask=inside, other=0.0))
        fence_async_shared()
        thread_barrier()

        position = before + (first_pair + HALF + gl.arange(0, 64, row_layout)) // GROUP
        acc = gl.zeros([64, DIM_BLOCK], gl.float32, o_layout)
        top = gl.full([64], -1.0e30, gl.float32, row_layout)  # finite, so that a query may see no key of a tile
        total = gl.zeros([64], gl.float32, row_layout)

        bar = step % STAGES * 4
        mbarrier.wait(bars.index(bar), step // STAGES % 2)
        scores = _scores(queries, k_tiles.index(step % STAGES), BLOCK_N, s_layout)
        scores = warpgroup_mma_wait(0, [scores])
        release(bars.index(bar + 1))
        weights, top, total, _ = _soften(
            _masked(scores, (blocks - 1) * BLOCK_N, position, BLOCK_N, s_layout), top, total, score_scale
        )
        hidden = gl.maximum(blocks - full, 1)  # tiles with a key that some query does not see
        for i in range(1, hidden):
            scores, acc = _overlap(
                step, queries, k_tiles, v_tiles, bars, weights, acc, BLOCK_N, STAGES, s_layout, o_layout
            )
            scores = _masked(scores, (blocks - 1 - i) * BLOCK_N, position, BLOCK_N, s_layout)
            weights, top, total, shrink = _soften(scores, top, total, score_scale)
            acc, total = _settle(step, bars, acc, total, shrink, STAGES, o_layout)
            step += 1
        for _ in range(hidden, blocks):
            scores, acc = _overlap(
                step, queries, k_tiles, v_tiles, bars, weights, acc, BLOCK_N, STAGES, s_layout, o_layout
            )
            weights, top, total, shrink = _soften(scores, top, total, score_scale)
            acc, total = _settle(step, bars, acc, total, shrink, STAGES, o_layout)
            step += 1
        bar = step % STAGES * 4
        mbarrier.wait(bars.index(bar + 2), step // STAGES % 2)
        operand = gl.convert_layout(weights.to(queries.dtype), gl.DotOperandLayout(0, o_layout, 2))
        acc = warpgroup_mma(operand, v_tiles.index(step % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        release(bars.index(bar + 3))
        step += 1

        # Through shared memory, where the queries were, so that whole lines are written.
        total = gl.convert_layout(total, gl.SliceLayout(1, o_layout))
        queries.store((acc / total[:, None]).to(queries.dtype))
        thread_barrier()
        # Asked for again, because keeping it in registers through the loops would cost more.
        head, first_token, count, _, first_pair, _, _, _ = _item(tiles, kv_heads, turn, GROUP, BLOCK_N)
        offsets, inside = _places(
            first_token, count, first_pair + HALF, head, stride_out_token, stride_out_head, GROUP, DIM, DIM_BLOCK,
            load_layout,
        )  # fmt: skip
        gl.store(out + offsets, queries.load(load_layout), mask=inside)
        thread_barrier()


@gluon.jit
def _places(
    first_token, count, first_pair, head, stride_token, stride_head,
    GROUP: gl.constexpr, DIM: gl.constexpr, DIM_BLOCK: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Offsets [64, DIM_BLOCK] of 64 pairs: pair m of a row is query m // GROUP with head m % GROUP of the group."""
    pair = first_pair + gl.arange(0, 64, gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM_BLOCK, gl.SliceLayout(0, layout))
    token = pair // GROUP
    offsets = (first_token + token).to(gl.int64) * stride_token + (head * GROUP + pair % GROUP) * stride_head
    return offsets[:, None] + dim[None, :], (token < count)[:, None] & (dim < DIM)[None, :]


@gluon.jit
def _scores(queries, k_tile, BLOCK_N: gl.constexpr, s_layout: gl.constexpr):
    blank = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    return warpgroup_mma(queries, k_tile.permute((1, 0)), blank, use_acc=False, is_async=True)


@gluon.jit
def _overlap(
    step, queries, k_tiles, v_tiles, bars, weights, acc,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Start the scores of the next tile and the sum of this one's values; the scores are there on return."""
    next_bar = (step + 1) % STAGES * 4
    mbarrier.wait(bars.index(next_bar), (step + 1) // STAGES % 2)
    scores = _scores(queries, k_tiles.index((step + 1) % STAGES), BLOCK_N, s_layout)
    mbarrier.wait(bars.index(step % STAGES * 4 + 2), step // STAGES % 2)
    operand = gl.convert_layout(weights.to(queries.dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc = warpgroup_mma(operand, v_tiles.index(step % STAGES), acc, is_async=True)
    scores = warpgroup_mma_wait(1, [scores])
    release(bars.index(next_bar + 1))
    return scores, acc


@gluon.jit
def _settle(step, bars, acc, total, shrink, STAGES: gl.constexpr, o_layout: gl.constexpr):
    """Wait for the sum of values, give its tile back, and make it relative to the new top."""
    # The softmax has to run beside the sum, but compilers would move it behind the wait. The total stands for it, and
    # a barrier that was passed before ends the block of instructions that the assembler reorders.
    mbarrier.wait(bars.index(step % STAGES * 4 + 2), step // STAGES % 2)
    acc, total = warpgroup_mma_wait(0, [acc, total])
    release(bars.index(step % STAGES * 4 + 3))
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None], total


@gluon.jit
def _masked(scores, start, position, BLOCK_N: gl.constexpr, s_layout: gl.constexpr):
    key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    return gl.where(key[None, :] <= position[:, None], scores, float("-inf"))


@gluon.jit
def _soften(scores, top, total, scale):
    """One step of the online softmax: the weights, the new top and total, and what old sums shrink by."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink
