"""WidenedWeights: the weights of a narrow model in float32, widened layer by layer while they are used."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

import torch

from tokenmill.model.layers import LayerWeights, WeightStore
from tokenmill.quant.scheme import Dense, Linear

Part = TypeVar("Part")


class WidenedWeights:
    """A view of a store: one widened layer at a time, so that a model needs no second copy of itself."""

    def __init__(self, inner: WeightStore) -> None:
        self._inner = inner
        self.dtype, self.device = torch.float32, inner.device
        self.embed = inner.embed
        self.final_norm = inner.final_norm.float()

    @property
    def lm_head(self) -> Linear:
        return _wide(self._inner.lm_head)

    def layer(self, index: int) -> LayerWeights:
        return _wide(self._inner.layer(index))

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:  # [tokens] -> [tokens, hidden]
        return self._inner.embedding(ids).float()


def _wide(part: Part) -> Part:
    """The same with every float tensor in float32. Quantized weights stay: they take inputs of any width."""
    if isinstance(part, torch.Tensor):
        return part.float()  # type: ignore[return-value]
    if isinstance(part, Linear):
        dense = isinstance(part.scheme, Dense)
        storage = {"weight": part.storage["weight"].float()} if dense else part.storage
        return Linear(Dense() if dense else part.scheme, storage, _wide(part.bias))  # type: ignore[return-value]
    if part is None:
        return part
    return replace(part, **{field.name: _wide(getattr(part, field.name)) for field in fields(part)})  # type: ignore[type-var,arg-type]
