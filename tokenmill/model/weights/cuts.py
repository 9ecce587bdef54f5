"""Cuts: which parts of a checkpoint's tensors a rank reads, and where in its own parameters they go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from tokenmill.errors import ModelError
from tokenmill.model.shard import Held
from tokenmill.model.weights.names import Piece
from tokenmill.quant.forms import GROUPS
from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.scheme import Linear, QuantScheme, RoundsRows

_CHUNK = 1 << 24  # elements rounded at once, so that the wide copy stays small

Box = tuple[range, ...]  # by dimension


@dataclass(frozen=True)
class Cut:
    """A box of a checkpoint's tensor, and the box of the rank's parameter that it fills."""

    source: Box
    target: Box
    whole: bool  # it is all of the tensor

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(span.start, span.stop) for span in self.source)

    @property
    def numel(self) -> int:
        return math.prod(map(len, self.source))


def cuts(
    piece: Piece,
    shape: tuple[int, ...],  # of the whole model's parameter
    held: Held,
) -> Iterator[Cut]:
    """In the order in which their rows stand in the parameter; none where the rank holds nothing of the piece."""
    spans = [range(size) for size in shape]
    if piece.expert is None:
        spans[0] = range(piece.first, piece.first + piece.shape[0] // piece.unit)
    else:
        spans[0] = range(piece.expert, piece.expert + 1)
        spans[1] = range(piece.first, piece.first + piece.shape[0])
    kept = [list(_kept(span, held.get(dim))) for dim, span in enumerate(spans)]
    for boxes in product(*kept):
        source = [source for source, _ in boxes]
        if piece.expert is not None:
            source = source[1:]
        elif piece.unit > 1:  # rows of units: what lies between the first and the last dimension is the change's affair
            source = [range(source[0].start * piece.unit, source[0].stop * piece.unit), source[-1]]
        whole = tuple(map(len, source)) == piece.shape
        yield Cut(tuple(source), tuple(target for _, target in boxes), whole)


def _kept(span: range, held: tuple[range, ...] | None) -> Iterator[tuple[range, range]]:
    """What a rank has of a span of a dimension: where within the span, and where in its own parameter."""
    at = 0
    for one in held or (range(span.stop),):
        first, last = max(one.start, span.start), min(one.stop, span.stop)
        if first < last:
            mine = at + first - one.start
            yield range(first - span.start, last - span.start), range(mine, mine + last - first)
        at += len(one)


def scales_rows(scheme: QuantScheme) -> bool:
    """Whether it must see whole rows to store a part of their columns as one that stores all of them does."""
    return isinstance(scheme, RoundsRows) and scheme.whole_rows


def write_columns(weight: Linear, first: int, rows: torch.Tensor, columns: range) -> None:  # [n, all columns]
    """Store some columns of whole rows, rounded with the scales of the whole rows where these have one."""
    if len(columns) == rows.shape[1] or not scales_rows(weight.scheme):
        weight.scheme.write(weight.storage, first, rows[:, columns.start : columns.stop])
        return
    assert isinstance(weight.scheme, RoundsRows)
    for part in torch.split(rows, max(1, _CHUNK // rows.shape[1])):
        span = range(len(part))
        cut = Cut((span, columns), (span, range(len(columns))), whole=False)
        weight.scheme.write_groups(weight.storage, first, cut_groups(weight.scheme.rounded(part), cut))
        first += len(part)


def cut_groups(groups: Groups, cut: Cut) -> Groups:
    """The part of a quantized matrix; groups that are cut through become several with the same scale."""
    if cut.whole:
        return groups
    rows, columns = cut.index
    scale, zeros, width = groups.scale[rows], groups.zeros, groups.codes.shape[1]
    zeros = None if zeros is None else zeros[rows]
    if groups.scale.shape[1] > 1 and cut.source[1] != range(width):
        group = math.gcd(groups.group, cut.source[1].start, len(cut.source[1]))
        repeats = groups.group // group
        some = slice(cut.source[1].start // group, cut.source[1].stop // group)
        scale = scale.repeat_interleave(repeats, dim=1)[:, some]
        zeros = None if zeros is None else zeros.repeat_interleave(repeats, dim=1)[:, some]
    codes = groups.codes[rows, columns].contiguous()
    return Groups(codes, scale.contiguous(), groups.bits, zeros, groups.inputs, groups.input_scale)


def cut_group(group: int | None, cut: Cut) -> int | None:
    """The group of a stored form once its matrix is cut; 0: there is none that kernels know."""
    if group is None or cut.whole:
        return group
    start, size = cut.source[1].start, len(cut.source[1])
    fitting = (one for one in sorted(GROUPS, reverse=True) if group % one == 0 and start % one == 0 and size % one == 0)
    return next(fitting, 0)


def check_shape(name: str, found: tuple[int, ...], piece: Piece) -> None:
    if found != piece.shape:
        raise ModelError(
            f"tensor {name!r} has shape {list(found)} but config.json implies {list(piece.shape)};"
            " check that config.json belongs to these weights"
        )


def put(target: torch.Tensor, cut: Cut, piece: Piece, value: torch.Tensor) -> None:
    """Write what was read into a parameter that is a tensor."""
    where = [slice(span.start, span.stop) for span in cut.target]
    box = target[tuple(where)]
    box.copy_(value.view(box.shape) if piece.expert is not None else value)
