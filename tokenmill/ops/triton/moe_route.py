"""Where tokens go in a mixture of experts: the choice of experts, and the order that groups tokens by expert."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tokenmill.ops.registry import FLOATS
from tokenmill.ops.triton.config import declare, power_of_two

_FEW_TOKENS = 8  # up to this many tokens read the router row by row
_CHUNK = 2048  # choices that one program of the grouping looks at, as long as that makes few enough chunks
_MAX_CHUNKS = 32
_TILES = 64  # tile records written at a time


def route(
    x: torch.Tensor,  # [tokens, hidden]
    router: torch.Tensor,  # [experts, hidden] float32
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [tokens, top_k] float32, experts [tokens, top_k] int32
    """The experts of largest softmax, best first; of equal ones the first."""
    return choose(router_scores(x, router), top_k, normalize, scale)


def router_scores(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:  # [tokens, experts] float32
    """x @ router.T to the precision of float32, without a copy of x in float32."""
    if x.shape[0] <= _FEW_TOKENS:
        return few_scores(x, router)
    if x.dtype != torch.bfloat16:
        return F.linear(x.float(), router)
    return split_scores(x, router)


def few_scores(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    (tokens, hidden), experts = x.shape, router.shape[0]
    scores = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    _few_scores_kernel[(tokens, triton.cdiv(experts, 2))](
        x, router, scores, x.stride(0), router.stride(0),
        HIDDEN=hidden, EXPERTS=experts, ROWS=2, DEPTH=min(power_of_two(hidden), 2048), num_warps=4,
    )  # fmt: skip
    return scores


def split_scores(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    (tokens, hidden), experts = x.shape, router.shape[0]
    scores = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    # Few tiles of tokens cannot fill the device, so the experts are divided too.
    few = tokens <= 512
    block_m, block_n = (16, 16) if few else (64, max(16, min(128, power_of_two(experts))))
    _split_scores_kernel[(triton.cdiv(tokens, block_m), triton.cdiv(experts, block_n))](
        x, router, scores, tokens, x.stride(0), router.stride(0),
        HIDDEN=hidden, EXPERTS=experts, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=128 if few else 64,
        num_warps=4 if few else 8, num_stages=5 if few else 3,
    )  # fmt: skip
    return scores


@triton.jit
def _few_scores_kernel(
    x,  # [tokens, HIDDEN]
    router,  # [EXPERTS, HIDDEN]
    scores,  # [tokens, EXPERTS]
    stride_token,
    stride_expert,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    token = tl.program_id(0)
    expert = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in tl.static_range(0, HIDDEN, DEPTH):
        inside = (expert < EXPERTS)[:, None] & (k + start < HIDDEN)[None, :]
        weights = tl.load(router + expert[:, None] * stride_expert + (start + k)[None, :], mask=inside, other=0.0)
        row = tl.load(x + token * stride_token + start + k, mask=start + k < HIDDEN, other=0.0)
        total += weights * row.to(tl.float32)[None, :]
    tl.store(scores + token * EXPERTS + expert, tl.sum(total, 1), mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["tokens"])
def _split_scores_kernel(
    x,  # [tokens, HIDDEN]
    router,  # [EXPERTS, HIDDEN]
    scores,  # [tokens, EXPERTS]
    tokens,
    stride_token,
    stride_expert,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A float32 is the sum of three bfloat16, whose products with a bfloat16 are exact in float32."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + tl.where(token < tokens, token, 0).to(tl.int64)[:, None] * stride_token + k[None, :]
    router_at = router + tl.where(expert < EXPERTS, expert, 0)[:, None] * stride_expert + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        inside = (k + start < HIDDEN)[None, :]
        row = tl.trans(tl.load(x_at + start, mask=inside, other=0.0))
        rest = tl.load(router_at + start, mask=inside, other=0.0)
        for _ in tl.static_range(3):
            part = rest.to(x.dtype.element_ty)
            rest -= part.to(tl.float32)
            total = tl.dot(part, row, total)
    kept = (token < tokens)[:, None] & (expert < EXPERTS)[None, :]
    tl.store(scores + token.to(tl.int64)[:, None] * EXPERTS + expert[None, :], tl.trans(total), mask=kept)


def choose(
    scores: torch.Tensor,  # [tokens, experts] float32
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = scores.shape
    assert scores.dtype == torch.float32 and scores.stride(1) == 1
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=scores.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=scores.device)
    block = power_of_two(experts)
    tokens_each = 1 if tokens <= 256 else max(1, min(8, 1024 // block))
    _choose_kernel[(triton.cdiv(tokens, tokens_each),)](
        scores, weights, chosen, tokens, scores.stride(0), scale,
        EXPERTS=experts, BLOCK=block, TOP_K=top_k, COLUMNS=power_of_two(top_k), NORMALIZE=normalize,
        TOKENS=tokens_each, num_warps=1 if tokens_each * block <= 256 else 4,
    )  # fmt: skip
    return weights, chosen


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    scores,  # [tokens, EXPERTS]
    weights,  # [tokens, TOP_K]
    chosen,  # [tokens, TOP_K]
    tokens,
    stride_token,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (expert < EXPERTS)[None, :]
    x = tl.load(scores + token.to(tl.int64)[:, None] * stride_token + expert[None, :], mask=inside, other=float("-inf"))
    x = tl.where((token < tokens)[:, None], x, 0.0)
    odds = tl.exp(x - tl.max(x, 1)[:, None])
    probs = tl.div_rn(odds, tl.broadcast_to(tl.sum(odds, 1)[:, None], odds.shape))
    # One integer orders by probability, then by index: bits of floats that are not negative order as they do.
    # A NaN counts as zero here, so that its row still names experts that exist; its weight stays NaN.
    bits = tl.where(probs > 0.0, probs, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    rank = (bits << 32) | (BLOCK - 1 - expert)[None, :]
    rank = tl.where((expert < EXPERTS)[None, :], rank, -1)
    best_weights = tl.zeros([TOKENS, COLUMNS], tl.float32)
    best_experts = tl.zeros([TOKENS, COLUMNS], tl.int32)
    for place in tl.static_range(TOP_K):
        best = BLOCK - 1 - (tl.max(rank, 1) & 0xFFFFFFFF).to(tl.int32)
        taken = expert[None, :] == best[:, None]
        share = tl.sum(tl.where(taken, probs, 0.0), 1)
        rank = tl.where(taken, -1, rank)
        here = column[None, :] == place
        best_weights = tl.where(here, share[:, None], best_weights)
        best_experts = tl.where(here, best[:, None], best_experts)
    if NORMALIZE:
        total = tl.broadcast_to(tl.sum(best_weights, 1)[:, None], best_weights.shape)
        best_weights = tl.div_rn(best_weights, total)
    to = token.to(tl.int64)[:, None] * TOP_K + column[None, :]
    kept = (token < tokens)[:, None] & (column < TOP_K)[None, :]
    tl.store(weights + to, best_weights * scale, mask=kept)
    tl.store(chosen + to, best_experts, mask=kept)


@dataclass(frozen=True)
class Groups:
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
) -> Groups:
    choices = experts.numel()
    max_tiles = choices // block_m + min(num_experts, choices)
    order = torch.empty(choices, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(max_tiles, 4, dtype=torch.int32, device=experts.device)
    bins = max(32, power_of_two(num_experts))
    chunk = max(_CHUNK, power_of_two(triton.cdiv(choices, _MAX_CHUNKS)))
    chunks = triton.cdiv(choices, chunk)
    counts = order  # not read when there is one chunk
    if chunks > 1:
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=experts.device)
        _count_kernel[(chunks,)](experts, counts, choices, BINS=bins, CHUNK=chunk, num_warps=4)
    else:
        chunk = max(32, power_of_two(choices))
    _group_kernel[(num_experts, chunks)](
        experts, counts, order, tiles, choices, chunks, max_tiles, num_experts,
        BINS=bins, CHUNK=chunk, CHUNKS=power_of_two(chunks), BLOCK_M=block_m, TILES=_TILES, num_warps=4,
    )  # fmt: skip
    return Groups(order, tiles, block_m)


@triton.jit(do_not_specialize=["choices"])
def _count_kernel(
    experts,  # [choices]
    counts,  # [chunks, BINS]: choices of every expert in a chunk
    choices,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    choice = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + choice, mask=choice < choices, other=0).to(tl.int32)
    found = tl.histogram(chosen, BINS, mask=choice < choices)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


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
):
    """One program places the choices of one expert in one chunk, in their order, so no two programs must agree."""
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    choice = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + choice, mask=choice < choices, other=0).to(tl.int32)
    mine = (chosen == expert) & (choice < choices)
    bins = tl.arange(0, BINS)
    before = 0  # choices of this expert in the chunks before
    if CHUNKS == 1:
        sizes = tl.histogram(chosen, BINS, mask=choice < choices)
    else:
        row = tl.arange(0, CHUNKS)
        table = tl.load(counts + row[:, None] * BINS + bins[None, :], mask=(row < chunks)[:, None], other=0)
        sizes = tl.sum(table, 0)
        earlier = (row < chunk)[:, None] & (bins == expert)[None, :]
        before = tl.sum(tl.sum(tl.where(earlier, table, 0), 1), 0)
    first = tl.sum(tl.where(bins < expert, sizes, 0), 0)
    place = first + before + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order + place, choice, mask=mine)
    if chunk == 0:
        size = tl.sum(tl.where(bins == expert, sizes, 0), 0)
        tiles_of = (sizes + BLOCK_M - 1) // BLOCK_M
        first_tile = tl.sum(tl.where(bins < expert, tiles_of, 0), 0)
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


# It has to be there for every dtype of a model, because no other implementation is registered.
IMPLEMENTATIONS = (replace(declare(route), dtypes=FLOATS),)
