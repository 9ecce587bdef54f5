"""Round to nearest: a float matrix becomes Groups; scales from the largest weights, or searched for the least error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.errors import ConfigError
from tokenmill.quant.forms import GROUPS, WeightForm
from tokenmill.quant.groups import Groups

FLOAT8 = torch.float8_e4m3fn
_CHUNK = 1 << 22  # elements whose scales are searched at once: a candidate's copies stay small
# What is tried, of the range of a group: within four bits' last code on either side, then ever less of it.
_RANGES = [15 / 14, 15 / 16, *(1 - 0.02 * step for step in range(1, 26))]


@dataclass(frozen=True)
class Grid:
    """The numbers that codes of a form can be."""

    low: float
    high: float
    bits: int
    dtype: torch.dtype

    @property
    def reach(self) -> float:
        """What the largest magnitude becomes; half a step beyond the last of few codes, where clipping costs less."""
        return (self.high - self.low) / 2 if self.bits == 4 else self.high


INT4 = Grid(-8, 7, 4, torch.int8)
INT8 = Grid(-127, 127, 8, torch.int8)
E4M3 = Grid(-448, 448, 8, FLOAT8)
GRIDS = {"int4": INT4, "int8": INT8, "w8a8": INT8, "fp8": E4M3}
INPUTS = {"w8a8": "int8", "fp8": "fp8"}  # forms whose inputs are rounded, too


def round_to_nearest(
    weight: torch.Tensor,  # [rows, columns]
    form: WeightForm,
    clip_search: bool = False,
    *,
    importance: torch.Tensor | None = None,  # [columns], or [groups, group, group]: see `find_scales`
    scale_dtype: torch.dtype = torch.float32,
) -> Groups:
    """The nearest codes. Scales are rounded to their dtype first, so that codes fit what is stored."""
    scale, zeros = find_scales(weight, form, clip_search, importance=importance, scale_dtype=scale_dtype)
    grouped = weight.reshape(weight.shape[0], scale.shape[1], -1)
    codes = encode(grouped, scale[..., None], None if zeros is None else zeros[..., None], GRIDS[form.kind])
    return pack(codes.flatten(1), scale, zeros, form)


def pack(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, form: WeightForm) -> Groups:
    """Groups from codes that `encode` made, still as floats."""
    grid = GRIDS[form.kind]
    small = None if zeros is None else zeros.to(torch.int8)
    return Groups(codes.to(grid.dtype), scale, grid.bits, small, inputs=INPUTS.get(form.kind))


def group_of(form: WeightForm, columns: int) -> int:
    """Columns that share a scale: the whole row, or the form's group."""
    group = form.group or columns
    if form.kind not in GRIDS:
        raise ConfigError(f"{form.name} is no quantized form; there are {', '.join(GRIDS)}")
    if columns % group:
        raise ConfigError(
            f"{form.name} needs rows of a multiple of {group} weights, and this matrix has {columns}; "
            f"take one of the groups {', '.join(f'g{size}' for size in GROUPS if columns % size == 0) or 'of int8'}"
        )
    return group


def find_scales(
    weight: torch.Tensor,  # [rows, columns]
    form: WeightForm,
    clip_search: bool = False,
    *,
    importance: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # [rows, groups] in scale_dtype, zeros as floats
    """Scale and zero of each group.

    The search takes the range with the least error of the group: the sum of squares; weighted per column with
    `importance` [columns] (how large the inputs are); or the error of the group's own part of the product, with
    `importance` [groups, group, group] (what X^T X is for the group's columns).
    """
    group = group_of(form, weight.shape[1])
    wide = weight if weight.dtype == torch.float64 else weight.float()
    grouped = wide.reshape(wide.shape[0], -1, group)  # [rows, groups, group]
    if not clip_search:
        return _of_range(*_range(grouped), form, scale_dtype)
    if importance is not None and importance.dim() == 1:
        importance = importance.view(-1, group)  # [groups, group]
    step = max(1, _CHUNK // weight.shape[1])
    found = [_search(part, form, importance, scale_dtype) for part in torch.split(grouped, step)]
    zeros = torch.cat([zeros for _, zeros in found if zeros is not None]) if form.zeros else None
    return torch.cat([scale for scale, _ in found]), zeros


def encode(
    weight: torch.Tensor,
    scale: torch.Tensor,  # broadcasts against the weight
    zeros: torch.Tensor | None,
    grid: Grid,
) -> torch.Tensor:
    """The nearest codes, as floats of the weight's own dtype, float32 or wider."""
    wide = weight if weight.dtype == torch.float64 else weight.float()
    codes = wide / scale.to(wide.dtype)
    if grid.dtype == FLOAT8:
        return codes.clamp(grid.low, grid.high).to(FLOAT8).to(wide.dtype)
    codes = codes.round()
    return (codes if zeros is None else codes + zeros).clamp(grid.low, grid.high)


def decode(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """The weights that codes of `encode` stand for."""
    return (codes if zeros is None else codes - zeros) * scale.to(codes.dtype)


def _range(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, groups, group] -> [rows, groups] x 2
    """Zero is always inside: it must have a code."""
    low, high = grouped.aminmax(dim=-1)
    return low.clamp(max=0), high.clamp(min=0)


def _of_range(
    low: torch.Tensor, high: torch.Tensor, form: WeightForm, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    grid = GRIDS[form.kind]
    extent, reach = (high - low, grid.high - grid.low) if form.zeros else (torch.maximum(-low, high), grid.reach)
    # By a tensor: a GPU multiplies with a number's reciprocal, and the largest weight, half way between two codes, may
    # then get the other one.
    scale = extent / torch.full_like(extent, reach)
    # A scale that its dtype rounds to nothing would make every weight infinite.
    scale = torch.where(scale == 0, 1.0, scale.clamp(min=torch.finfo(scale_dtype).tiny)).to(scale_dtype)
    if not form.zeros:
        return scale, None
    return scale, (grid.low - low / scale.to(low.dtype)).round().clamp(grid.low, grid.high)


def _search(
    grouped: torch.Tensor,  # [rows, groups, group]
    form: WeightForm,
    importance: torch.Tensor | None,  # [groups, group] or [groups, group, group]
    scale_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    low, high = _range(grouped)
    scale, zeros = _of_range(low, high, form, scale_dtype)
    least = _error(grouped, scale, zeros, form, importance)
    for share in _RANGES:
        other, other_zeros = _of_range(low * share, high * share, form, scale_dtype)
        error = _error(grouped, other, other_zeros, form, importance)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, other, scale)
        if zeros is not None and other_zeros is not None:
            zeros = torch.where(better, other_zeros, zeros)
    return scale, zeros


def _error(
    grouped: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    form: WeightForm,
    importance: torch.Tensor | None,
) -> torch.Tensor:  # [rows, groups]
    spread = None if zeros is None else zeros[..., None]
    missing = decode(encode(grouped, scale[..., None], spread, GRIDS[form.kind]), scale[..., None], spread) - grouped
    if importance is None:
        return missing.square().sum(-1)
    if importance.dim() == 2:
        return (missing.square() * importance.to(missing.dtype)).sum(-1)
    product = torch.einsum("rgi,gij->rgj", missing, importance.to(missing.dtype))
    return (product * missing).sum(-1)


def group_blocks(gram: torch.Tensor, group: int) -> torch.Tensor:  # [columns, columns] -> [groups, group, group]
    """The parts of X^T X that hold one group's columns each."""
    count = gram.shape[0] // group
    return gram.view(count, group, count, group).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
