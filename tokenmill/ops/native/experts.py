"""Experts on the native library: routing, and grouped products of packed matrices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tokenmill.ops.native.call import check_float32, run
from tokenmill.ops.native.elementwise import ACTIVATIONS
from tokenmill.ops.native.matrix import PackedMatrix
from tokenmill.ops.native.recording import NotRecordableError, new, row_count
from tokenmill.ops.native.structs import ExpertMatrix, ExpertsArgs, RouteArgs


class PackedExperts:
    """A packed matrix per expert, all of one shape, and the table of them that the library reads."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self.matrices = tuple(matrices)
        self._table: ctypes.Array[ExpertMatrix] | None = None

    @property
    def table(self) -> ctypes.Array[ExpertMatrix]:
        """Made when all rows have been packed."""
        if self._table is None:
            if any(one.filled != one.rows for one in self.matrices):
                raise ValueError("experts are multiplied before all of their rows are packed")
            self._table = (ExpertMatrix * len(self.matrices))(*(_entry(one) for one in self.matrices))
        return self._table


def _entry(matrix: PackedMatrix) -> ExpertMatrix:
    entry = ExpertMatrix(num_segments=len(matrix.segments))
    for number, (form, rows, panels) in enumerate(matrix.segments):
        place = entry.segments[number]
        place.panels, place.rows, place.form = panels.data_ptr(), rows, form.number
    return entry


def route(
    x: torch.Tensor,  # [tokens, hidden]
    router: torch.Tensor,  # [experts, hidden] float32
    top_k: int,
    normalize: bool,
    scale: float,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [tokens, top_k] float32, experts [tokens, top_k] int64
    x, router = x if x.stride(1) == 1 else x.contiguous(), router.contiguous()  # for as long as it runs
    shares, chosen = new((len(x), top_k)), new((len(x), top_k), torch.int64)
    if len(x):
        run(route_args(x, router, shares, chosen, normalize, scale, groups, top_groups))
    return shares, chosen


def route_args(
    x: torch.Tensor,  # [tokens, hidden], rows without gaps, which the caller keeps, as the next
    router: torch.Tensor,  # [experts, hidden] float32, contiguous
    shares: torch.Tensor,  # [tokens, top_k], and the next, to be filled
    chosen: torch.Tensor,  # [tokens, top_k]
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
) -> RouteArgs:
    check_float32(x, router)
    if x.stride(1) != 1 or not router.is_contiguous():  # a copy made here would be gone when it is read
        raise NotRecordableError(f"rows of strides {x.stride()} and {router.stride()} cannot be routed where they lie")
    return RouteArgs(
        x=x, router=router, shares=shares, chosen=chosen, rows=row_count(len(x)), hidden=x.shape[1],
        experts=len(router), x_stride=x.stride(0), top_k=chosen.shape[1], groups=groups, top_groups=top_groups,
        normalize=int(normalize), scale=scale,
    )  # fmt: skip


def moe_packed(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]
    experts: torch.Tensor,  # [tokens, k] integers; of one that is not there, nothing is added
    gate_up: PackedExperts,  # [2 * inner, hidden] each
    down: PackedExperts,  # [hidden, inner] each
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    """Tokens are sorted by expert; inputs of products are rounded, or not, as those of packed matrices are."""
    check_float32(x, weights)
    tokens, hidden = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    weights, experts = weights.contiguous(), experts.long().contiguous()
    out = new((tokens, hidden))
    if tokens:
        run(ExpertsArgs(
            x=x, share=weights, chosen=experts, gate_up=ctypes.addressof(gate_up.table),
            down=ctypes.addressof(down.table), out=out, x_stride=x.stride(0), out_stride=hidden,
            rows=row_count(tokens), top_k=experts.shape[1], experts=len(gate_up.matrices), hidden=hidden,
            inner=down.matrices[0].columns, activation=ACTIVATIONS[kind],
        ))  # fmt: skip
    return out
