"""GPTQ: rounds a matrix column by column, and lets the columns not yet rounded make up for each error."""

from __future__ import annotations

import torch

from tokenmill.quant.forms import WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import GRIDS, decode, encode, find_scales, group_blocks, group_of, pack

BLOCK = 128  # columns whose errors are gathered before the rest of the matrix is corrected
DAMPING = 0.01  # of the mean of the diagonal, added to it: directions that the text never takes stay bounded
_ATTEMPTS = 6


def gptq(
    weight: torch.Tensor,  # [rows, columns]
    gram: torch.Tensor,  # [columns, columns]: X^T X of the inputs
    form: WeightForm,
    *,
    act_order: bool = True,
    damping: float = DAMPING,
    scale_dtype: torch.dtype = torch.float32,
) -> Groups:
    """Codes that keep the products with the inputs, rather than the weights, close to what they were.

    With act_order, columns with the largest inputs are rounded first, while most others can still make up for them.
    Scales are then fixed beforehand, and so groups stay runs of neighbours: nothing about the order is stored.
    Without it, a group's scales are found when its turn comes, from what the columns before have made of it.
    """
    grid, group = GRIDS[form.kind], group_of(form, weight.shape[1])
    work = weight.float().clone()
    gram = gram.to(work.dtype)
    columns = weight.shape[1]
    importance = group_blocks(gram, group) if group < columns else gram.diagonal()
    order = gram.diagonal().argsort(descending=True) if act_order else torch.arange(columns, device=weight.device)
    scale, zeros = find_scales(work, form, clip_search=True, importance=importance, scale_dtype=scale_dtype)
    spread = inverse_factor(gram[order][:, order], damping)  # [columns, columns], upper
    work = work[:, order]
    codes = torch.empty_like(work)
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        errors = torch.empty_like(work[:, first:last])
        for at in range(first, last):
            column = int(order[at])
            if not act_order and group < columns and column % group == 0:
                number = column // group
                found, found_zeros = find_scales(
                    work[:, at : at + group],  # never beyond the block: its size is a multiple of every group
                    form,
                    clip_search=True,
                    importance=importance[number : number + 1],
                    scale_dtype=scale_dtype,
                )
                scale[:, number] = found[:, 0]
                if zeros is not None and found_zeros is not None:
                    zeros[:, number] = found_zeros[:, 0]
            own_scale = scale[:, column // group]
            own_zeros = None if zeros is None else zeros[:, column // group]
            codes[:, at] = encode(work[:, at], own_scale, own_zeros, grid)
            error = (work[:, at] - decode(codes[:, at], own_scale, own_zeros)) / spread[at, at]
            work[:, at:last] -= error[:, None] * spread[at, at:last]
            errors[:, at - first] = error
        work[:, last:] -= errors @ spread[first:last, last:]
    return pack(codes[:, order.argsort()], scale, zeros, form)


def inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse: row c says how a later column makes up for an error in column c."""
    mean = gram.diagonal().mean()
    mean = mean if mean > 0 else torch.ones_like(mean)
    for _ in range(_ATTEMPTS):
        damped = gram + torch.eye(gram.shape[0], device=gram.device, dtype=gram.dtype) * (mean * damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping *= 10  # rounding made the matrix singular
    raise ValueError("the inputs' second moments are not finite")
