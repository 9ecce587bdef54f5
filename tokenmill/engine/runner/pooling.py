"""Pooler: the hidden states of a prompt as one vector, which a step's chunks add up to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.engine.step import Step


@dataclass(frozen=True)
class Pooled:
    """Vectors of the rows whose prompts a step has come to the end of."""

    indices: list[int]  # of rows in the step
    vectors: torch.Tensor  # [rows, hidden] float64, of unit length


class Pooler:
    """Keeps the sums of prompts that are read in several steps. A row's first chunk starts it anew, whoever had it."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}  # row -> [hidden] float64, on the device

    def pool(
        self,
        step: Step,
        hidden: torch.Tensor,  # [tokens, hidden]
    ) -> Pooled | None:
        ended: dict[int, torch.Tensor] = {}
        # Sums of a step are made in a dtype for which no widened copy of all its states is needed.
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        first = 0
        for index, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            if row in step.pooling:
                pooling, prompt_len = step.pooling[row]
                states = hidden[first : first + count]
                vector = (states.sum(0, dtype=dtype) if pooling == "mean" else states[-1]).double()
                if pooling == "mean" and start:
                    vector += self._sums.pop(row)
                if start + count == prompt_len:
                    ended[index] = vector
                else:
                    self._sums[row] = vector
            first += count
        if not ended:
            return None
        return Pooled(list(ended), torch.nn.functional.normalize(torch.stack(list(ended.values()))))
