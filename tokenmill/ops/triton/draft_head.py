"""What a draft head does around its products, in one kernel each: its input, and the token that it drafts."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import quick_launch, start_next, wait_for_previous

_PICK_BLOCK = 4096


def head_input(
    state: torch.Tensor,  # [n, width]
    ids: torch.Tensor,  # [n] int64: the tokens that come next
    embed: torch.Tensor,  # [vocab, hidden], in the dtype of `state`
    weight: torch.Tensor,  # [width + hidden]
    eps: float,
) -> torch.Tensor:  # [n, width + hidden]
    """The norm of states with the embeddings of their tokens behind them."""
    (n, width), hidden = state.shape, embed.shape[1]
    out = state.new_empty(n, width + hidden)
    _input_kernel[(n,)](
        state, ids, embed, weight, out, width, width + hidden, embed.stride(0), eps,
        BLOCK=power_of_two(width + hidden), num_warps=4,
    )  # fmt: skip
    return out


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["ids"])
def _input_kernel(
    state, ids, embed, weight, out, width, total, stride_embed, eps, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    start_next(PDL)
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, mask=column < total, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    own = tl.load(state + row * width + column, mask=column < width, other=0.0)
    behind = (column >= width) & (column < total)
    next_one = tl.load(embed + token * stride_embed + column - width, mask=behind, other=0.0)
    value = tl.where(column < width, own, next_one).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / total + eps) * gain
    tl.store(out + row * total + column, value.to(out.dtype.element_ty), mask=column < total)


def head_pick(
    logits: torch.Tensor,  # [n, draft vocabulary]
    names: torch.Tensor,  # [draft vocabulary] int64: tokens of the target
    rows: torch.Tensor,  # [n] int64
    drafts: torch.Tensor,  # [table rows, drafted] int64
    depth: int,
) -> torch.Tensor:  # [n] int64
    """The likeliest token of each, which is also written to the row's drafts."""
    out = torch.empty_like(rows)
    _pick_kernel[(len(rows),)](
        logits, names, rows, drafts, out, logits.shape[1], logits.stride(0), drafts.stride(0), depth,
        BLOCK=min(_PICK_BLOCK, power_of_two(logits.shape[1])), num_warps=8,
    )  # fmt: skip
    return out


@quick_launch
@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["rows", "out"])
def _pick_kernel(
    logits, names, rows, drafts, out, vocab, stride_row, stride_drafts, depth,
    BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    at = place
    for start in range(0, vocab, BLOCK):
        value = tl.load(logits + entry * stride_row + start + place, mask=start + place < vocab, other=float("-inf"))
        better = value.to(tl.float32) > top
        at = tl.where(better, start + place, at)
        top = tl.where(better, value.to(tl.float32), top)
    best = tl.max(top, 0)
    first = tl.min(tl.where(top == best, at, vocab - 1), 0)  # NaN compares with nothing: any token will do
    token = tl.load(names + first)
    tl.store(out + entry, token)
    tl.store(drafts + tl.load(rows + entry) * stride_drafts + depth, token)


IMPLEMENTATIONS = tuple(declare(fn, optional=True) for fn in (head_input, head_pick))
