"""The gated activation of a feed-forward layer: act(gate) * up in one pass."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.numeric import activate

_BLOCK = 1024


def act_mul(
    x: torch.Tensor,  # [tokens, 2 * inner]: gate, then up
    kind: str,  # "silu" or "gelu_tanh"
) -> torch.Tensor:  # [tokens, inner]
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {kind!r} is not one of silu, gelu_tanh")
    inner = x.shape[-1] // 2
    flat = x if x.dim() == 2 else x.reshape(-1, 2 * inner)
    out = x.new_empty((*x.shape[:-1], inner))
    _act_mul_kernel[(flat.shape[0], ceil_div(inner, _BLOCK))](
        flat, out, inner, flat.stride(0), SILU=kind == "silu", BLOCK=_BLOCK, num_warps=4
    )
    return out


@quick_launch
@triton.jit
def _act_mul_kernel(
    x,  # [tokens, 2 * inner]
    out,  # [tokens, inner]
    inner,
    stride_token,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dim < inner
    wait_for_previous(PDL)
    gate = tl.load(x + token * stride_token + dim, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * stride_token + inner + dim, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the product, as two separate ops would.
    active = activate(gate, SILU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * inner + dim, (active * up).to(out.dtype.element_ty), mask=inside)


IMPLEMENTATIONS = (declare(act_mul),)
