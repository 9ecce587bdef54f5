"""Experts: the matrices of a layer's experts in one form, and their product in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from tokenmill.ops.reference import act_mul
from tokenmill.ops.types import Storage
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.scheme import Linear, QuantScheme, StacksExperts


@dataclass(frozen=True)
class Experts:
    """Matrices of one shape, one per expert: a scheme, and what it stores each in."""

    scheme: QuantScheme
    storages: tuple[Storage, ...]  # by expert
    stacked: Storage = field(default_factory=dict)  # the same tensors, [experts, ...]; empty where a scheme has others
    _operands: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.storages)

    def linear(self, expert: int) -> Linear:
        return Linear(self.scheme, self.storages[expert])

    @property
    def op(self) -> str:
        """The op of the registry that multiplies them, where the device has it."""
        return self.scheme.experts_op

    @property
    def operand(self) -> Any:
        """What that op takes for them; asked for when all have arrived."""
        if not self._operands:
            stacks = isinstance(self.scheme, StacksExperts)
            self._operands.append(cast(StacksExperts, self.scheme).stack(self.storages) if stacks else self.stacked)
        return self._operands[0]


def allocate_experts(
    scheme: QuantScheme, count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Experts:
    """Room for `count` matrices [rows, columns]; of schemes that store tensors one after the other."""
    if isinstance(scheme, StacksExperts):
        return Experts(scheme, tuple(scheme.allocate(rows, columns, dtype, device) for _ in range(count)))
    one = scheme.allocate(rows, columns, dtype, device)
    stacked: Storage = {name: part[None].repeat(count, *[1] * part.dim()) for name, part in one.items()}
    storages = tuple({name: part[expert] for name, part in stacked.items()} for expert in range(count))
    return Experts(scheme, storages, stacked)


def experts_of_floats(weights: torch.Tensor) -> Experts:  # [experts, rows, columns]
    return Experts(Dense(), tuple({"weight": one} for one in weights), {"weight": weights})


def moe_each(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]
    experts: torch.Tensor,  # [tokens, k] integers
    gate_up: Experts,  # [2 * inner, hidden] each
    down: Experts,  # [hidden, inner] each
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    """One expert after the other, by the products of its scheme: for devices without an op for these forms."""
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    done = x.new_empty(len(order), x.shape[1])
    at = 0
    for expert, count in enumerate(_counts(experts, len(gate_up))):
        if count:
            mine = order[at : at + count]
            inner = act_mul(gate_up.linear(expert)(x[mine // k]), kind)
            done[mine] = down.linear(expert)(inner)
            at += count
    return torch.bmm(weights.to(x.dtype)[:, None], done.view(*experts.shape, -1))[:, 0]


def _counts(experts: torch.Tensor, count: int) -> Sequence[int]:
    counts: list[int] = experts.flatten().bincount(minlength=count).tolist()
    return counts
