"""Where tokens go in a mixture of experts: the choice of experts, and the order that groups tokens by expert."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.moe.scores import router_scores

FEW_TOKENS = 8  # up to this many tokens read the router row by row
_ONE_CHUNK = 2048  # up to this many choices are looked at by the program of every expert
_CHUNK, _MAX_CHUNKS = 512, 128  # of more, a program looks at one chunk; chunks grow only when there are too many
_TILES = 64  # tile records written at a time


def route(
    x: torch.Tensor,  # [tokens, hidden]
    router: torch.Tensor,  # [experts, hidden] float32
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [tokens, top_k] float32, experts [tokens, top_k] int32
    """The experts of largest softmax, best first; of equal ones the first."""
    if x.shape[0] <= FEW_TOKENS:
        return route_few(x, router, top_k, normalize, scale)
    return choose(router_scores(x, router), top_k, normalize, scale)


def route_few(
    x: torch.Tensor, router: torch.Tensor, top_k: int, normalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All in one launch: whoever computes the last score of a token chooses its experts."""
    (tokens, hidden), experts = x.shape, router.shape[0]
    weights, chosen = _choices(tokens, top_k, x.device)
    scores = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    _few_kernel[(tokens, experts)](
        x, router, scores, _counters(x.device), weights, chosen, x.stride(0), router.stride(0), scale,
        HIDDEN=hidden, DEPTH=min(power_of_two(hidden), 2048), EXPERTS=experts, BLOCK=power_of_two(experts),
        TOP_K=top_k, COLUMNS=power_of_two(top_k), NORMALIZE=normalize, num_warps=1,
    )  # fmt: skip
    return weights, chosen


@lru_cache
def _counters(device: torch.device) -> torch.Tensor:  # [FEW_TOKENS]
    """Counts the scores of a token; every launch leaves zeros behind. Launches of one device follow each other."""
    return torch.zeros(FEW_TOKENS, dtype=torch.int32, device=device)


def _choices(tokens: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    return weights, torch.empty(tokens, top_k, dtype=torch.int32, device=device)


@quick_launch
@triton.jit
def _few_kernel(
    x,  # [tokens, HIDDEN]
    router,  # [EXPERTS, HIDDEN]
    scores,  # [tokens, EXPERTS]
    counters,  # [tokens]
    weights,  # [tokens, TOP_K]
    chosen,  # [tokens, TOP_K]
    stride_token,
    stride_expert,
    scale,
    HIDDEN: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr = False,
):
    token = tl.program_id(0)
    expert = tl.program_id(1)
    k = tl.arange(0, DEPTH)
    start_next(PDL)
    # The row of the router is on its way before there are tokens.
    row = tl.load(router + expert * stride_expert + k, mask=k < HIDDEN, other=0.0)
    wait_for_previous(PDL)
    total = tl.zeros([DEPTH], tl.float32)
    for start in tl.static_range(0, HIDDEN, DEPTH):
        inside = start + k < HIDDEN
        if start > 0:
            row = tl.load(router + expert * stride_expert + start + k, mask=inside, other=0.0)
        total += row * tl.load(x + token * stride_token + start + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(scores + token * EXPERTS + expert, tl.sum(total, 0), cache_modifier=".cg")
    tl.debug_barrier()  # the score is written before the arrival is counted
    if tl.atomic_add(counters + token, 1, sem="acq_rel") == EXPERTS - 1:
        tl.store(counters + token, 0)  # ready for the next launch
        all_experts = tl.arange(0, BLOCK)[None, :]
        known = all_experts < EXPERTS
        all_scores = tl.load(
            scores + token * EXPERTS + all_experts, mask=known, other=float("-inf"), cache_modifier=".cg"
        )
        best_weights, best_experts = _best(all_scores, EXPERTS, TOP_K, COLUMNS, NORMALIZE)
        column = tl.arange(0, COLUMNS)[None, :]
        tl.store(weights + token * TOP_K + column, best_weights * scale, mask=column < TOP_K)
        tl.store(chosen + token * TOP_K + column, best_experts, mask=column < TOP_K)


def choose(
    scores: torch.Tensor,  # [parts, tokens, experts] float32, contiguous
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    parts, tokens, experts = scores.shape
    assert scores.dtype == torch.float32 and scores.is_contiguous()
    weights, chosen = _choices(tokens, top_k, scores.device)
    block = power_of_two(experts)
    tokens_each = 1 if tokens <= 512 else max(1, min(8, 1024 // block))
    _choose_kernel[(ceil_div(tokens, tokens_each),)](
        scores, weights, chosen, tokens, scale,
        PARTS=parts, EXPERTS=experts, BLOCK=block, TOP_K=top_k, COLUMNS=power_of_two(top_k), NORMALIZE=normalize,
        TOKENS=tokens_each, num_warps=1 if tokens_each * block <= 256 else 4,
    )  # fmt: skip
    return weights, chosen


@quick_launch
@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    scores,  # [PARTS, tokens, EXPERTS]
    weights,  # [tokens, TOP_K]
    chosen,  # [tokens, TOP_K]
    tokens,
    scale,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (expert < EXPERTS)
    at = scores + token.to(tl.int64)[:, None] * EXPERTS + expert
    x = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + tokens.to(tl.int64) * (part * EXPERTS), mask=inside, other=0.0)
    x = tl.where(expert < EXPERTS, x, float("-inf"))
    best_weights, best_experts = _best(x, EXPERTS, TOP_K, COLUMNS, NORMALIZE)
    column = tl.arange(0, COLUMNS)[None, :]
    to = token.to(tl.int64)[:, None] * TOP_K + column
    kept = (token < tokens)[:, None] & (column < TOP_K)
    tl.store(weights + to, best_weights * scale, mask=kept)
    tl.store(chosen + to, best_experts, mask=kept)


@triton.jit
def _best(
    x,  # [tokens, block]: scores, -inf where there is no expert
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Weights and experts [tokens, COLUMNS], of which the first TOP_K count."""
    TOKENS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    expert = tl.arange(0, BLOCK)[None, :]
    column = tl.arange(0, COLUMNS)[None, :]
    odds = tl.exp(x - tl.max(x, 1)[:, None])
    total = tl.sum(odds, 1)[:, None]
    probs = tl.div_rn(odds, tl.broadcast_to(total, odds.shape))
    # Bits of floats that are not negative order as they do, and one instruction finds the largest of a warp's integers.
    # A NaN counts as zero here, so that its row still names experts that exist; its weights become NaN in the end.
    bits = tl.where(probs > 0.0, probs, 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(expert < EXPERTS, bits, -1)
    best_bits = tl.zeros([TOKENS, COLUMNS], tl.int32)
    best_experts = tl.zeros([TOKENS, COLUMNS], tl.int32)
    for place in tl.static_range(TOP_K):
        top = tl.max(bits, 1)[:, None]
        best = tl.min(tl.where(bits == top, expert, BLOCK), 1)[:, None]
        bits = tl.where(expert == best, -1, bits)
        best_bits = tl.where(column == place, top, best_bits)
        best_experts = tl.where(column == place, best, best_experts)
    best_weights = best_bits.to(tl.float32, bitcast=True) + total * 0.0
    if NORMALIZE:
        best_weights = tl.div_rn(best_weights, tl.broadcast_to(tl.sum(best_weights, 1)[:, None], best_weights.shape))
    return best_weights, best_experts


@dataclass(frozen=True)
class ExpertGroups:
    """Choices (token, place) in the order of their experts, cut into tiles of at most block_m rows of one expert.

    Sizes do not depend on what was chosen: tiles that are not needed have no rows.
    """

    order: torch.Tensor  # [tokens * k] int32: which choice, token * k + place, each row is
    tiles: torch.Tensor  # [at most] int32 x 4: expert, first row, row after the last, unused
    block_m: int

    @property
    def max_tiles(self) -> int:
        return self.tiles.shape[0]


def group_by_expert(
    experts: torch.Tensor,  # [tokens, k], contiguous
    num_experts: int,
    block_m: int,
) -> ExpertGroups:
    choices = experts.numel()
    max_tiles = choices // block_m + min(num_experts, choices)
    order = torch.empty(choices, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(max_tiles, 4, dtype=torch.int32, device=experts.device)
    bins = max(32, power_of_two(num_experts))
    if choices <= _ONE_CHUNK:
        _group_few_kernel[(num_experts,)](
            experts, order, tiles, choices, max_tiles, num_experts,
            BINS=bins, CHUNK=max(32, power_of_two(choices)), BLOCK_M=block_m, TILES=_TILES, num_warps=4,
        )  # fmt: skip
        return ExpertGroups(order, tiles, block_m)
    chunk = max(_CHUNK, power_of_two(ceil_div(choices, _MAX_CHUNKS)))
    chunks = ceil_div(choices, chunk)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=experts.device)
    _count_kernel[(chunks,)](experts, counts, choices, BINS=bins, CHUNK=chunk, num_warps=4)
    _group_kernel[(max(chunks, num_experts),)](
        experts, counts, order, tiles, choices, chunks, max_tiles, num_experts,
        BINS=bins, CHUNK=chunk, CHUNKS=power_of_two(chunks), BLOCK_M=block_m, TILES=_TILES, num_warps=16,
    )  # fmt: skip
    return ExpertGroups(order, tiles, block_m)


@quick_launch
@triton.jit(do_not_specialize=["choices", "max_tiles"])
def _group_few_kernel(
    experts,  # [choices]
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    choices,
    max_tiles,
    num_experts,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One program places the choices of one expert, in their order, so no two programs must agree."""
    start_next(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    choice = tl.arange(0, CHUNK)
    chosen = tl.load(experts + choice, mask=choice < choices, other=0).to(tl.int32)
    sizes = tl.histogram(chosen, BINS, mask=choice < choices)
    mine = (chosen == expert) & (choice < choices)
    first = tl.sum(tl.where(tl.arange(0, BINS) < expert, sizes, 0), 0)
    tl.store(order + first + tl.cumsum(mine.to(tl.int32), 0) - 1, choice, mask=mine)
    _tiles_of(tiles, sizes, expert, max_tiles, num_experts, BINS, BLOCK_M, TILES)


@quick_launch
@triton.jit(do_not_specialize=["choices"])
def _count_kernel(
    experts,  # [choices]
    counts,  # [chunks, BINS]: choices of every expert in a chunk
    choices,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    choice = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + choice, mask=choice < choices, other=0).to(tl.int32)
    found = tl.histogram(chosen, BINS, mask=choice < choices)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@quick_launch
@triton.jit(do_not_specialize=["choices", "chunks", "max_tiles"])
def _group_kernel(
    experts,  # [choices]
    counts,  # [chunks, BINS]
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    choices,
    chunks,
    max_tiles,
    num_experts,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A program places the choices of one chunk, behind those of the chunks before, and lists one expert's tiles."""
    start_next(PDL)
    wait_for_previous(PDL)
    here = tl.program_id(0)
    row = tl.arange(0, CHUNKS)
    bins = tl.arange(0, BINS)
    table = tl.load(counts + row[:, None] * BINS + bins[None, :], mask=(row < chunks)[:, None], other=0)
    sizes = tl.sum(table, 0)
    if here < chunks:
        before = tl.sum(tl.where((row < here)[:, None], table, 0), 0)
        mine = tl.sum(tl.where((row == here)[:, None], table, 0), 0)
        within = tl.arange(0, CHUNK)
        choice = here * CHUNK + within
        chosen = tl.load(experts + choice, mask=choice < choices, other=BINS).to(tl.int32)
        ranked = tl.sort(chosen * CHUNK + within)  # by expert, then in order; what is no choice comes last
        chosen = tl.minimum(ranked // CHUNK, BINS - 1)
        # An expert's choices begin behind those of other experts and of earlier chunks; here, behind the chunk's own.
        shift = tl.cumsum(sizes, 0) - sizes + before - (tl.cumsum(mine, 0) - mine)
        place = tl.gather(shift, chosen, 0) + within
        tl.store(order + place, here * CHUNK + ranked % CHUNK, mask=choice < choices)
    if here < num_experts:
        _tiles_of(tiles, sizes, here, max_tiles, num_experts, BINS, BLOCK_M, TILES)


@triton.jit
def _tiles_of(
    tiles, sizes, expert, max_tiles, num_experts, BINS: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr
):
    """List the tiles of one expert; behind those of the last expert come tiles without rows."""
    bins = tl.arange(0, BINS)
    first = tl.sum(tl.where(bins < expert, sizes, 0), 0)
    size = tl.sum(tl.where(bins == expert, sizes, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, (sizes + BLOCK_M - 1) // BLOCK_M, 0), 0)
    needed = (size + BLOCK_M - 1) // BLOCK_M
    for start in range(0, needed, TILES):
        tile = start + tl.arange(0, TILES)
        _write_tiles(tiles, first_tile + tile, expert, first + tile * BLOCK_M, first + size, tile < needed)
    if expert == num_experts - 1:
        for start in range(first_tile + needed, max_tiles, TILES):
            tile = start + tl.arange(0, TILES)
            _write_tiles(tiles, tile, 0, tile * 0, 0, tile < max_tiles)


@triton.jit
def _write_tiles(tiles, tile, expert, row, end, mask):
    nothing = tile * 0
    tl.store(tiles + tile * 4, nothing + expert, mask=mask)
    tl.store(tiles + tile * 4 + 1, row, mask=mask)
    tl.store(tiles + tile * 4 + 2, nothing + end, mask=mask)


# Where it does not fit, the model routes in torch (model/moe.py).
IMPLEMENTATIONS = (declare(route, batch_invariant=False, optional=True),)
