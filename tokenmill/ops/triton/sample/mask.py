"""Forbids the tokens that a grammar does not allow, from one bit per token."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous

_BLOCK = 4096


def allow_only(
    logits: torch.Tensor,  # [n, vocab], overwritten
    masks: torch.Tensor,  # [rows, 1 + words] int32: whether the row has a mask; then one bit per token, lowest first
    rows: torch.Tensor,  # [n]: whose mask is for which logits
) -> None:
    """Like `ops.shaping.allow_only`. Rows without a mask cost the reading of one word, so it may be recorded
    for batches in which any of the rows may have one.
    """
    count, vocab = logits.shape
    assert logits.stride(1) == 1 and masks.is_contiguous()
    _allow_only_kernel[(count, ceil_div(vocab, _BLOCK))](
        logits, masks, rows, vocab, logits.stride(0), masks.stride(0), BLOCK=_BLOCK, num_warps=8
    )


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["rows"])
def _allow_only_kernel(
    logits,  # [n, vocab]
    masks,  # [rows, 1 + words]
    rows,  # [n]
    vocab,
    stride_entry,
    stride_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(0).to(tl.int64)
    masks += tl.load(rows + entry).to(tl.int64) * stride_row
    if tl.load(masks) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        word = tl.load(masks + 1 + token // 32, mask=inside, other=0)
        forbidden = ((word >> (token % 32)) & 1) == 0
        nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + entry * stride_entry + token, nothing, mask=inside & forbidden)
