"""Experts that are not all here: who has which, who computes a choice, how many one may take, how many it took."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tokenmill.model.spec import DecoderSpec

if TYPE_CHECKING:
    from tokenmill.model.layers import MoEWeights
    from tokenmill.ops.registry import Ops

LEAST_CAPACITY = 4  # tokens that every expert may take, however few there are in a step


@dataclass(frozen=True)
class ExpertLimits:
    """What of a mixture is not computed as the router says."""

    capacity: float | None = None  # tokens that an expert may take of a step, as a multiple of its even share

    def tokens(self, chosen: int, experts: int) -> int:
        """How many of so many choices one expert may take."""
        assert self.capacity is not None
        return max(LEAST_CAPACITY, math.ceil(self.capacity * chosen / experts))


class ExpertLoad:
    """How often each expert was chosen. What is counted lies on the device, and is read when somebody asks."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self.dropped = torch.zeros(layers, dtype=torch.int64, device=device)  # choices beyond an expert's capacity

    @classmethod
    def like(cls, other: ExpertLoad) -> ExpertLoad:
        """As large, and empty."""
        layers, experts = other.counts.shape
        return cls(layers, experts, other.counts.device)

    def add(self, layer: int, experts: torch.Tensor) -> None:  # [tokens, top_k]
        chosen = experts.flatten().long()
        self.counts[layer].index_add_(0, chosen, torch.ones_like(chosen))

    def hottest(self, count: int) -> tuple[int, ...]:
        """The experts that were chosen most often, over all layers; of equal ones the first."""
        totals = self.counts.sum(0)
        return tuple(sorted(totals.argsort(descending=True, stable=True)[:count].tolist()))


def shares_of_experts(experts: int, ranks: int, hot: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """The experts that each rank has: an even share, and all of the hot ones, whose tokens they divide."""
    each = experts // ranks
    return [tuple(sorted({*range(rank * each, (rank + 1) * each), *hot})) for rank in range(ranks)]


class ExpertSource(Protocol):
    """Has the experts that a layer's tokens chose ready, where not all of them are on the device.

    Asked on the thread and stream that computes, between a layer's choice and its experts' products. What it returns
    holds until the next call; a source may use the call to start bringing experts of the layer that follows.
    """

    def bring(
        self,
        layer: int,
        x: torch.Tensor,  # [tokens, hidden]: what the experts are given
        experts: torch.Tensor,  # [tokens, top_k] integers
        mlp: MoEWeights,  # with those experts that have a place of their own
        ops: Ops,
    ) -> tuple[torch.Tensor, MoEWeights]:  # [tokens, top_k]
        """Where in the matrices that it returns the experts lie. While a step is recorded the same is recorded.
        StepFailed: they cannot be had.
        """
        ...


class LocalExperts:
    """Which of the experts that tokens chose a rank computes. The sum over ranks is all of them."""

    def __init__(self, spec: DecoderSpec, device: torch.device, in_turns: bool = True) -> None:
        """in_turns: all ranks have the same tokens, and divide those of experts that all of them have."""
        assert spec.moe is not None and spec.part is not None and spec.part.experts is not None
        held, hot = spec.part.experts, spec.part.hot_experts
        self._ranks, self._rank = spec.part.expert_ranks, spec.part.expert_rank
        places = torch.full((spec.moe.experts,), -1)
        places[list(held)] = torch.arange(len(held))
        self._places = places.to(device)  # [experts]: where an expert's weights are; -1: on another rank
        is_hot = torch.zeros(spec.moe.experts, dtype=torch.bool)
        is_hot[list(hot)] = True
        self._is_hot = is_hot.to(device) if hot and in_turns else None  # [experts]: all ranks have it

    def compute(
        self,
        op: Callable[..., torch.Tensor],  # `moe`
        x: torch.Tensor,  # [tokens, hidden]
        share: torch.Tensor,  # [tokens, top_k]
        experts: torch.Tensor,  # [tokens, top_k], of all ranks
        gate_up: torch.Tensor,  # [places, 2 * intermediate, hidden]
        down: torch.Tensor,  # [places, hidden, intermediate]
        activation: str,
    ) -> torch.Tensor:  # [tokens, hidden]
        chosen = experts.long()
        where = self._places[chosen]
        if self._is_hot is not None:  # ranks take turns, token by token
            turn = torch.arange(len(x), device=x.device)[:, None] % self._ranks
            where = torch.where(self._is_hot[chosen] & (turn != self._rank), -1, where)
        if x.device.type != "cpu":  # as many as without ranks, so that the host need not wait to hear how many
            share = torch.where(where >= 0, share, 0)
            return op(x, share, where.clamp_min(0).to(experts.dtype), gate_up, down, activation)
        token, choice = ((where >= 0) & (share != 0)).nonzero(as_tuple=True)
        out = torch.zeros_like(x)
        if len(token):
            here = where[token, choice, None]
            out.index_add_(0, token, op(x[token], share[token, choice, None], here, gate_up, down, activation))
        return out


def within_capacity(
    share: torch.Tensor,  # [tokens, top_k]
    experts: torch.Tensor,  # [tokens, top_k] integers
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, top_k], [] how many were dropped
    """The shares without those of tokens beyond an expert's capacity, which go to those that come first."""
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    by_expert = flat[order]
    number = torch.arange(len(flat), device=flat.device) - torch.searchsorted(by_expert, by_expert)
    place = torch.empty_like(flat).index_copy_(0, order, number)  # [choices]: how many came before, of its expert
    kept = (place < capacity).view(share.shape)
    return torch.where(kept, share, 0), (~kept).sum()
