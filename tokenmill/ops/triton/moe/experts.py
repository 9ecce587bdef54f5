"""A mixture of experts: few tokens read their experts row by row, many are grouped into matrix products per expert."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import HOPPER_MOE, usable
from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.moe.few import few, few_shapes
from tokenmill.ops.triton.moe.grouped import ExpertTile, down_rows, gate_up_rows
from tokenmill.ops.triton.moe.route import group_by_expert

# Up to this many tokens hardly share experts, and whole rows of weights are on their way at once without any loop.
FEW_TOKENS = 4
# With more choices per expert the products of hopper.py are faster, where they fit (scripts/gpu_moe.py).
NARROW_CHOICES = 24


def shapes(choices_per_expert: float, dtype: torch.dtype) -> tuple[ExpertTile, ExpertTile]:
    """For gate_up (block_n rows of each half) and for down. Both cut tokens alike.

    Up to 32 tokens per tile the weights' traffic is all that counts: narrow tiles, deep pipelines.
    """
    if dtype == torch.float32:
        block_m = 16 if choices_per_expert <= 16 else 64
        return ExpertTile(block_m, 32, 32, 4, 2), ExpertTile(block_m, 64, 32, 4, 2)
    if choices_per_expert <= 8:
        return ExpertTile(16, 128, 128, 8, 3), ExpertTile(16, 128, 128, 8, 3)
    if choices_per_expert <= NARROW_CHOICES:
        return ExpertTile(32, 128, 128, 8, 3), ExpertTile(32, 128, 64, 8, 5)
    if choices_per_expert <= 64:
        return ExpertTile(64, 128, 64, 4, 4, 8), ExpertTile(64, 256, 64, 4, 4, 8)
    return ExpertTile(128, 128, 64, 8, 4, 8, bulk=True), ExpertTile(128, 256, 64, 8, 4, 8)


def moe(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]: how much of each chosen expert
    experts: torch.Tensor,  # [tokens, k] integers: which experts
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {kind!r} is not one of silu, gelu_tanh")
    assert gate_up.stride(2) == down.stride(2) == x.stride(1) == 1
    weights, experts = weights.contiguous(), experts.contiguous()
    if x.shape[0] <= FEW_TOKENS:
        return few(x, weights, experts, gate_up, down, kind, few_shapes(x.dtype))
    per_expert = experts.numel() / gate_up.shape[0]
    by_hopper = per_expert > NARROW_CHOICES and hopper_fits(x, gate_up, down)
    launch = None if by_hopper else shapes(per_expert, x.dtype)
    return grouped(x, weights, experts, gate_up, down, kind, launch)


def grouped(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    kind: str,
    launch: tuple[ExpertTile, ExpertTile] | None,  # None: by the products of hopper.py
) -> torch.Tensor:
    """Tokens in the order of their experts, so that each expert is one matrix product."""
    if launch is None:
        from tokenmill.ops.triton.moe.hopper import BLOCK_M, down_rows_hopper, gate_up_rows_hopper

        groups = group_by_expert(experts, gate_up.shape[0], BLOCK_M)
        active = gate_up_rows_hopper(x, groups, experts.shape[1], gate_up, kind)
        return join(down_rows_hopper(active, groups, down), weights)
    groups = group_by_expert(experts, gate_up.shape[0], launch[0].block_m)
    active = gate_up_rows(x, groups, experts.shape[1], gate_up, kind, launch[0])
    return join(down_rows(active, groups, down, launch[1]), weights)


def hopper_fits(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether there are products for this device and these sizes in hopper.py."""
    if not usable(HOPPER_MOE, x.device):
        return False
    from tokenmill.ops.triton.moe.hopper import fits

    return fits(x, gate_up, down)


def join(
    parts: torch.Tensor,  # [tokens * k, hidden]
    weights: torch.Tensor,  # [tokens, k]
    **options: bool,  # of the compiler
) -> torch.Tensor:  # [tokens, hidden]
    (tokens, k), hidden = weights.shape, parts.shape[1]
    out = torch.empty(tokens, hidden, dtype=parts.dtype, device=parts.device)
    # Few tokens are divided among more programs; how a number is summed does not depend on it.
    block = min(power_of_two(hidden), 512 if tokens <= 256 else 2048)
    _join_kernel[(tokens, ceil_div(hidden, block))](
        parts, weights, out, HIDDEN=hidden, PLACES=k, BLOCK=block, num_warps=max(1, block // 512), **options
    )
    return out


@quick_launch
@triton.jit
def _join_kernel(
    parts,  # [tokens, PLACES, HIDDEN]
    weights,  # [tokens, PLACES]
    out,  # [tokens, HIDDEN]
    HIDDEN: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The experts of a token in the order in which it chose them."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(PLACES):
        choice = token * PLACES + place
        part = tl.load(parts + choice * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
        total += part * tl.load(weights + choice).to(tl.float32)
    tl.store(out + token * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)


IMPLEMENTATIONS = (declare(moe, batch_invariant=False, features=(HOPPER_MOE,)),)
