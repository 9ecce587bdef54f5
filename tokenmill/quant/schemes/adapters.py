"""LoRA: what tokens of a step ask of linear layers, each for itself: which low-rank adapter is added to its product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenmill.ops.matmul import RunGated
from tokenmill.ops.reference_low_rank import NO_ADAPTER as NO_ADAPTER
from tokenmill.ops.reference_low_rank import add_low_rank
from tokenmill.ops.types import Rows, Unnormed
from tokenmill.quant.schemes.scheme import Linear


@dataclass(frozen=True)
class RowContext:
    """What goes with the tokens of a step through every layer."""

    adapter: torch.Tensor  # [tokens] int64: the slot of the adapter, or NO_ADAPTER

    def pick(self, wanted: torch.Tensor) -> RowContext:  # [n]
        return RowContext(self.adapter[wanted])


@dataclass(frozen=True)
class LowRankUpdates:
    """The updates of several adapters to one linear layer, by slot.

    Rows that were stacked in one weight (q, k, v; gate, up) are sections: each has factors of its own.
    """

    down: torch.Tensor  # [slots, sections * rank, in]
    up: torch.Tensor  # [slots, rank, out], scaled
    ranks: torch.Tensor  # [slots] int64: how many of `rank` each adapter uses; 0: it leaves the layer as it is
    ends: tuple[int, ...]  # where each section ends among the outputs
    op: Callable[..., torch.Tensor] = add_low_rank

    def add(self, out: torch.Tensor, x: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
        """To a product of these inputs, in place; [tokens, out], [tokens, in], [tokens]."""
        return self.op(out, x, adapter, self.down, self.up, self.ranks, self.ends)


@dataclass(frozen=True)
class AdaptedLinear(Linear):
    """A linear layer with its adapters, for the rows of one step. Its input stays as it is: they read it, too."""

    updates: LowRankUpdates | None = None
    context: RowContext | None = None

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor) and self.updates is not None and self.context is not None
        return self.updates.add(super().__call__(x), x, self.context.adapter)

    def fuses(self, rows: int, dtype: torch.dtype, gated: bool = False) -> bool:
        return False

    def fused(self, x: torch.Tensor | Unnormed, act: str = "") -> torch.Tensor:
        raise AssertionError("a product with adapters is not fused with what is around it")

    def gated(self, x: torch.Tensor) -> RunGated | None:
        return None

    def inputs(self, rows: int, dtype: torch.dtype) -> torch.dtype | None:
        return None


def adapted(linear: Linear, updates: LowRankUpdates | None, context: RowContext) -> Linear:
    """The layer as it is for these rows."""
    if updates is None:
        return linear
    made = AdaptedLinear(linear.scheme, linear.storage, linear.bias, updates=updates, context=context)
    made._matmuls.update(linear._matmuls)  # what was chosen stays chosen
    return made
