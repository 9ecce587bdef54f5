"""WidenedWeights: the weights of a narrow model in float32, widened part by part while they are used."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F

from tokenmill.model.experts import ExpertSource
from tokenmill.model.layers import LayerWeights, MoEWeights, WeightStore
from tokenmill.ops.matmul import Matmul, MatmulKernel, MatmulNeed, dense_need, only
from tokenmill.ops.registry import Ops
from tokenmill.ops.types import Storage
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.experts import Experts
from tokenmill.quant.schemes.scheme import Linear

SMALL = 1 << 16  # elements: smaller tensors have no room of their own

Part = TypeVar("Part")
_EXPERTS = ("gate_up", "down")  # of a MoEWeights


@dataclass(frozen=True)
class _Matrices:
    gate_up: torch.Tensor | Experts
    down: torch.Tensor | Experts


class WidenedWeights:
    """A view of a store that holds little itself, whatever the size of the model: part of a matrix while it is
    multiplied, and one layer's experts, in room that the next layer's take over. The memory plan counts on it
    (plan/solve/memory.py, guard_bytes).
    """

    def __init__(self, inner: WeightStore, at_once: int) -> None:
        """at_once: bytes of a matrix that are float32 at a time."""
        self._inner = inner
        self._scheme = Widening(at_once)
        self._rooms: list[torch.Tensor] = []  # in the order in which a layer's large tensors come
        self._expert_rooms: list[torch.Tensor] = []  # of those that are brought
        self.dtype, self.device = torch.float32, inner.device
        self.embed = inner.embed
        self.final_norm = inner.final_norm.float()

    @property
    def lm_head(self) -> Linear:
        return self._wide(self._inner.lm_head, [])

    @property
    def experts(self) -> ExpertSource | None:
        return None if self._inner.experts is None else self

    def layer(self, index: int) -> LayerWeights:
        return self._wide(self._inner.layer(index), self._rooms)

    def bring(
        self, layer: int, x: torch.Tensor, experts: torch.Tensor, mlp: MoEWeights, ops: Ops
    ) -> tuple[torch.Tensor, MoEWeights]:
        """Experts that are brought are widened when they are there."""
        assert self._inner.experts is not None
        places, found = self._inner.experts.bring(layer, x, experts, mlp, ops)
        both = self._wide(_Matrices(found.gate_up, found.down), self._expert_rooms)
        return places, replace(mlp, gate_up=both.gate_up, down=both.down)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:  # [tokens] -> [tokens, hidden]
        return self._inner.embedding(ids).float()

    def _wide(self, part: Part, rooms: list[torch.Tensor]) -> Part:
        """The same with every float tensor in float32. Quantized weights stay: they take inputs of any width."""
        taken = 0

        def wide(part: Part) -> Part:
            nonlocal taken
            if part is None:
                return part
            if isinstance(part, Linear):
                scheme = self._scheme if part.scheme.floats else part.scheme
                bias = None if part.bias is None else part.bias.float()
                return Linear(scheme, part.storage, bias)  # type: ignore[return-value]
            if isinstance(part, Experts):
                return part  # no float ones
            if not isinstance(part, torch.Tensor):
                later = _EXPERTS if isinstance(part, MoEWeights) and self._inner.experts is not None else ()
                names = [one.name for one in fields(part) if one.name not in later]  # type: ignore[arg-type]
                return replace(part, **{name: wide(getattr(part, name)) for name in names})  # type: ignore[type-var]
            if part.dtype == torch.float32 or part.numel() < SMALL:
                return part.float()  # type: ignore[return-value]
            if taken == len(rooms):
                rooms.append(torch.empty(0, dtype=torch.float32, device=part.device))
            if rooms[taken].numel() < part.numel():
                rooms[taken] = torch.empty(part.numel(), dtype=torch.float32, device=part.device)
            taken += 1
            return rooms[taken - 1][: part.numel()].view(part.shape).copy_(part)  # type: ignore[return-value]

        return wide(part)


class Widening(Dense):
    """Multiplies in float32 with a narrow weight, of which some rows are widened at a time."""

    name = "widened"

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self._kernel = MatmulKernel("widened in parts", ("dense",), partial(_widened, at_once))

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        return only(self._kernel, dense_need(storage["weight"], dtype))


def _widened(
    at_once: int, need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None
) -> torch.Tensor:
    weight = storage["weight"]
    rows, columns = weight.shape
    count = max(1, at_once // (4 * columns))
    if rows <= count or weight.dtype == torch.float32:
        return F.linear(x, weight.float(), bias)
    out = x.new_empty(*x.shape[:-1], rows)
    for first in range(0, rows, count):
        last = first + count
        part = F.linear(x, weight[first:last].float(), None if bias is None else bias[first:last])
        out[..., first:last] = part
    return out
