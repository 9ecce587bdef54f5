"""PrecisionGuard: rows whose logits were no numbers are computed again in float32, apart from the others of a step."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property

import torch

from tokenmill.engine.step import Step
from tokenmill.model.decoder import Decoder, LayerKV, TokenBatch
from tokenmill.model.widened import WidenedWeights
from tokenmill.ops.reference_low_rank import add_low_rank
from tokenmill.ops.registry import Need, select
from tokenmill.plan.solve.memory import WIDENED_AT_ONCE

log = logging.getLogger("tokenmill.engine")


class PrecisionGuard:
    """A second decoder over the same weights, used by rows of `Step.in_float32` alone.

    Such a step is computed twice, in the model's dtype and in float32; each pass writes the keys and values of its own
    rows, so that the others get what they would have got without the guard.
    """

    def __init__(self, decoder: Decoder, need: Need, max_len: int) -> None:
        """need: what the decoder's own ops were chosen for."""
        self._plain = decoder
        self._need = need
        self._max_len = max_len
        self.marked: dict[int, int] = {}  # layers that gave what is no number -> how often that was seen

    @cached_property
    def _wide(self) -> Decoder:
        # On a GPU the fast ops want a cache of their own dtype; the reference takes any.
        ops = select(replace(self._need, dtype=torch.float32), "reference" if self._need.device == "cuda" else None)
        weights = WidenedWeights(self._plain.weights, WIDENED_AT_ONCE)
        spec, ranks = self._plain.spec, self._plain.ranks
        wide = Decoder(spec, weights, ops, self._max_len, ranks)  # type: ignore[arg-type]  # its head is read-only
        wide.adapters = {name: replace(one, op=add_low_rank) for name, one in self._plain.adapters.items()}
        return wide

    def forward(
        self, step: Step, tokens: TokenBatch, kv: list[LayerKV]
    ) -> torch.Tensor:  # [tokens, hidden], normed; float32
        is_wide = self._tokens_of(step, tokens.ids.device)
        looked_for = any(step.starts[index] == 0 for index in step.in_float32)  # once per request, when it begins again
        culprits: list[int] = []

        def watch(index: int, residual: torch.Tensor) -> None:
            if looked_for and not culprits and not torch.isfinite(residual[is_wide]).all():
                culprits.append(index)

        others = replace(tokens, slots=tokens.slots.masked_fill(is_wide, -1))
        plain = self._plain.forward(others, kv, watch)
        only_wide = replace(tokens, slots=tokens.slots.masked_fill(~is_wide, -1), features=None)
        wide = self._wide.forward(only_wide, kv)
        if looked_for:
            self._mark(step, culprits)
        return torch.where(is_wide[:, None], wide, plain.float())

    def logits(self, hidden: torch.Tensor, is_wide: torch.Tensor) -> torch.Tensor:  # [n, hidden], [n] -> [n, vocab]
        plain = self._plain.logits(hidden.to(self._plain.weights.dtype))
        return torch.where(is_wide[:, None], self._wide.logits(hidden), plain)

    def _tokens_of(self, step: Step, device: torch.device) -> torch.Tensor:  # [tokens] bool
        wide = set(step.in_float32)
        flags = [index in wide for index in range(len(step.rows))]
        return torch.tensor(flags, device=device).repeat_interleave(torch.tensor(step.counts, device=device))

    def _mark(self, step: Step, culprits: list[int]) -> None:
        dtype = str(self._plain.weights.dtype).removeprefix("torch.")
        named = [step.requests[index].id for index in step.in_float32] if step.requests else []
        ids = ", ".join(named) or f"{len(step.in_float32)} rows"
        for layer in culprits:
            self.marked[layer] = self.marked.get(layer, 0) + 1
        where = f"layer {culprits[0]} gives" if culprits else "the model gives"
        log.warning("%s what is no number in %s; float32 is used for: %s", where, dtype, ids)
