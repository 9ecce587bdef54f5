"""What a step that verified drafts leaves behind, and the interface of those that draft from it, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.model.decoder import TokenBatch
from tokenmill.ops.types import DecodeInputs
from tokenmill.sampling.settings import Traits


@dataclass(frozen=True)
class Verified:
    """The end of a step that verified drafts, from which a drafter goes on."""

    inputs: DecodeInputs  # [n]: the tokens that were computed, padding included
    hidden: torch.Tensor  # [n, hidden]: of these, normed
    tokens: torch.Tensor  # [n]: what was sampled behind each
    rows: torch.Tensor  # [n]: whose newest token that is; the scratch row where it does not count
    traits: Traits
    queries: int = 1  # tokens of each row, one behind the other; 1: rows have any number of them
    batch: TokenBatch | None = None  # what was computed, with the features of `feature_layers`

    @property
    def positions(self) -> torch.Tensor:  # [n]: where the sampled tokens stand
        return self.inputs.positions + 1

    def newest(self, nobody: int) -> torch.Tensor:  # [n / queries]
        """Where rows have equal numbers of entries: behind which of its own each one's newest token was sampled."""
        own = (self.rows.view(-1, self.queries) != nobody).int().argmax(1)
        return torch.arange(0, len(self.rows), self.queries, device=own.device) + own


class Drafter(Protocol):
    kind: str  # equal for those that launch the same kernels
    failure: Exception | None  # why it was switched off

    def draft(self, verified: Verified) -> None:
        """Leave in `DeviceState.drafts` how the rows may go on."""
        ...


@dataclass(frozen=True)
class VerifiedTrees:
    """The end of a step that verified trees: of every row what its newest token was sampled from."""

    hidden: torch.Tensor  # [rows, hidden], normed
    tokens: torch.Tensor  # [rows]: the newest ones
    positions: torch.Tensor  # [rows]: where these stand
    rows: torch.Tensor  # [rows]: whose they are; the scratch row's are padding
    traits: Traits


class TreeDrafter(Protocol):
    def grow(self, verified: VerifiedTrees) -> None:
        """Leave in `DeviceState.trees` how the rows may go on, and in `DeviceState.drafts` the likeliest path."""
        ...
