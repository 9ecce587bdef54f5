"""Sampling: argmax of logits plus counter-based noise; what filters need is in `filtered.py`."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.config import declare
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.numeric import gumbel, noise_key
from tokenmill.ops.triton.sample.filtered import sample_filtered
from tokenmill.ops.triton.sample.search import finite, first_best
from tokenmill.ops.types import SampleBatch

_CHUNK_BLOCK = 4096
_MAX_CHUNKS = 64


def sample(
    logits: torch.Tensor,  # [n, vocab] float32, or the model's dtype: what is read is widened exactly
    batch: SampleBatch,
) -> torch.Tensor:  # [n] int64; -1 where the row's logits hold a NaN or no finite value
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if batch.any_filter and not batch.all_greedy:
        sample_filtered(logits, batch, out)
        return out
    # Few rows cannot fill the device, so each is cut into chunks. A maximum does not depend on the cut.
    chunks = max(1, min(4 * multiprocessors(logits.device) // max(rows, 1), _MAX_CHUNKS))
    chunk = ceil_div(vocab, chunks * _CHUNK_BLOCK) * _CHUNK_BLOCK
    chunks = ceil_div(vocab, chunk)
    space = torch.empty(rows * chunks * 3, dtype=torch.float32, device=logits.device)
    _best_kernel[(rows, chunks)](
        logits, space, batch.temperature, batch.seed, batch.position, vocab, chunk, chunks, logits.stride(0),
        ALL_GREEDY=batch.all_greedy, BLOCK=_CHUNK_BLOCK, num_warps=16,
    )  # fmt: skip
    _join_kernel[(rows,)](space, out, chunks, CHUNKS=_MAX_CHUNKS, num_warps=1)
    return out


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(do_not_specialize=["chunk", "chunks"], do_not_specialize_on_alignment=["temperature", "seed", "position"])
def _best_kernel(
    logits,  # [rows, vocab]
    space,  # [rows, chunks, 3] float32: best value, largest logit (NaN if there is one), bits of the best token
    temperature,  # [rows]
    seed,  # [rows]
    position,  # [rows]
    vocab,
    chunk,
    chunks,
    stride_row,
    ALL_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, vocab)
    logits += row * stride_row
    heat = tl.load(temperature + row)
    greedy = heat < 1e-5
    heat = tl.maximum(heat, 1e-5)
    key = noise_key(tl.load(seed + row), tl.load(position + row))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    choice = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
        broken = broken | (x != x).to(tl.int32)
        top = tl.maximum(top, x)
        value = x
        if not ALL_GREEDY and not greedy:
            value = tl.div_rn(x, heat) + gumbel(key, token)
        choice = tl.where(value > best, token, choice)
        best = tl.maximum(best, value)
    best_value, best_token = first_best(best, choice)
    largest = tl.where(tl.max(broken, 0) > 0, float("nan"), tl.max(top, 0))
    space += (row * chunks + tl.program_id(1)) * 3
    tl.store(space, best_value)
    tl.store(space + 1, largest)
    tl.store(space + 2, best_token.to(tl.float32, bitcast=True))


@quick_launch
@triton.jit(do_not_specialize=["chunks"])
def _join_kernel(
    space,  # [rows, chunks, 3]
    out,  # [rows]
    chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    space += (row * chunks + chunk) * 3
    inside = chunk < chunks
    best = tl.load(space, mask=inside, other=float("-inf"))
    largest = tl.load(space + 1, mask=inside, other=float("-inf"))
    choice = tl.load(space + 2, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    _, token = first_best(best, choice)
    broken = tl.max((largest != largest).to(tl.int32), 0) > 0
    tl.store(out + row, tl.where(finite(tl.max(largest, 0)) & (not broken), token, -1).to(tl.int64))


IMPLEMENTATIONS = (declare(sample),)
