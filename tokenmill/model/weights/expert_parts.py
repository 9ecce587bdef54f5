"""The matrices of single experts, in checkpoints that hold each by itself or all of them stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tokenmill.model.weights.checkpoint import Checkpoint, PartCheckpoint
from tokenmill.model.weights.cuts import Cut, check_shape
from tokenmill.model.weights.names import Piece

OneExpert = tuple[int, Checkpoint, Piece, Cut]  # which of the rank's, and a matrix of a checkpoint, as of linear layers


def by_expert(checkpoint: Checkpoint, name: str, piece: Piece, cut: Cut) -> Iterator[OneExpert]:
    """What of a piece belongs to each expert."""
    matrix = Cut(cut.source[-2:], cut.target[1:], cut.whole)
    if piece.expert is not None:
        yield cut.target[0].start, checkpoint, replace(piece, expert=None), matrix
        return
    for source, target in zip(cut.source[0], cut.target[0], strict=True):
        one = replace(piece, shape=piece.shape[1:])
        matrix = replace(matrix, whole=tuple(map(len, cut.source[1:])) == one.shape)
        yield target, _Slice(checkpoint, piece, source), one, matrix


class _Slice:
    """A checkpoint's stacked tensor as the matrix of one expert."""

    def __init__(self, inner: Checkpoint, piece: Piece, expert: int) -> None:
        self.config: dict[str, Any] = inner.config
        self._inner, self._piece, self._expert = inner, piece, expert

    def names(self) -> list[str]:
        return self._inner.names()

    def tensor(self, name: str) -> torch.Tensor:
        return self.part(name, tuple(range(size) for size in self._piece.shape[1:]))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._piece.shape[1:]

    def part(self, name: str, box: tuple[range, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        inner = self._inner
        if isinstance(inner, PartCheckpoint):
            check_shape(name, inner.shape(name), self._piece)
            return inner.part(name, (range(self._expert, self._expert + 1), *box), dtype)[0]
        tensor = inner.tensor(name)
        check_shape(name, tuple(tensor.shape), self._piece)
        return tensor[self._expert][tuple(slice(span.start, span.stop) for span in box)]
