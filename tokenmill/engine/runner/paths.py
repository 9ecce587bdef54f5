"""Ways to compute a step: a runner asks each in turn whether it takes the step. The last of each kind takes every one.

A decode path does all of a step in which rows only decode, sampling included. Any other step is prepared by the runner
(inputs sent, tables written) and sampled by it; a forward path computes what lies between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from tokenmill.engine.runner.guard import PrecisionGuard
from tokenmill.engine.runner.inputs import PackedStep
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.step import Step
from tokenmill.model.decoder import Decoder, Features, TokenBatch
from tokenmill.ops.types import AttentionBatch
from tokenmill.quant.schemes.adapters import RowContext
from tokenmill.sampling.sampler import Sampled


class DecodePath(Protocol):
    """A recorded decode step: DecodeGraphs on a GPU, RecordedDecode on a CPU."""

    def takes(self, step: Step) -> bool: ...

    def run(self, step: Step) -> Sampled | None:  # [tokens]
        """None: this time it has to be computed in another way."""
        ...


@dataclass
class PreparedStep:
    """A step whose inputs are on the device."""

    step: Step
    state: DeviceState
    rows: torch.Tensor  # [tokens] int64; padding, where the path asked for it, is of the scratch row
    positions: torch.Tensor  # [tokens] int64
    places: torch.Tensor  # [tokens] int64: among the slots of their rows; the positions where nothing is pruned
    attention: AttentionBatch  # without the padding
    entries: torch.Tensor  # [n]: tokens whose logits are wanted
    all_wanted: bool  # these are all tokens, in their order
    sample_rows: list[int]  # rows of the entries, on the host
    features: Features | None = None  # that a head asks for
    adapters: torch.Tensor | None = None  # [tokens] int64: slots; None: no row has one

    @cached_property
    def tokens(self) -> TokenBatch:
        """As the decoder takes them; of no use to a path that pads."""
        rows, positions = self.rows, self.positions
        ids, slots = self.state.tokens[rows, positions], self.state.slots(rows, self.places)
        enters = None if self.state.entering is None else self.state.entering[: len(ids)]
        context = None if self.adapters is None else RowContext(self.adapters)
        return TokenBatch(ids, positions, slots, self.attention, context=context, features=self.features, enters=enters)


def attention_batch(
    step: Step, packed: PackedStep, part: dict[str, torch.Tensor], state: DeviceState
) -> AttentionBatch:
    """What attention needs to know of a step; `part`: the sections of what was packed, on the device."""
    seen = packed.attention
    return AttentionBatch(
        rows=part["rows"].int(),
        q_start=part["q_start"].int(),
        context=part["context"].int(),
        block_tables=state.block_tables,
        num_singles=seen.num_singles,
        max_query=max(seen.counts),
        max_context=max(seen.context),
        host_rows=seen.rows,
        host_counts=seen.counts,
        host_context=seen.context,
        shared_members=part["shared_members"].int() if step.shared else None,
        shared_tokens=part["shared_tokens"].int() if step.shared else None,
    )


class FeatureReader(Protocol):
    """An EAGLE head: it reads what layers of the model start from, of every token that is computed."""

    layers: tuple[int, ...]

    def read(self, prepared: PreparedStep) -> None:
        """At the end of a step: its features are there, and so are the tokens that were sampled."""
        ...


class ForwardPath(Protocol):
    """What computes a prepared step: PrecisionGuard's rows, PieceGraphs, RecordedChunks, or op by op."""

    def takes(self, step: Step) -> bool: ...

    def padded(self, step: Step) -> int:
        """To how many tokens the step is to be padded; 0: not at all."""
        ...

    def hidden(self, prepared: PreparedStep) -> torch.Tensor:  # [tokens, hidden]
        """Of all tokens, normed."""
        ...

    def logits(self, prepared: PreparedStep) -> torch.Tensor | None:  # [entries, vocab]
        """None: this time they have to be computed in another way."""
        ...

    def project(self, prepared: PreparedStep, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:  # [n, vocab]
        """Logits of some of the hidden states, which are of these rows."""
        ...


class PlainForward:
    """Op by op."""

    def __init__(self, decoder: Decoder, state: DeviceState) -> None:
        self.decoder, self.state = decoder, state

    def takes(self, step: Step) -> bool:
        return True

    def padded(self, step: Step) -> int:
        return 0

    def hidden(self, prepared: PreparedStep) -> torch.Tensor:
        return self.decoder.forward(prepared.tokens, self.state.kv)

    def logits(self, prepared: PreparedStep) -> torch.Tensor | None:
        wanted = None if prepared.all_wanted else prepared.entries
        hidden = self.decoder.forward(prepared.tokens, self.state.kv, wanted=wanted)
        return self.decoder.logits(hidden) if len(prepared.entries) else hidden

    def project(self, prepared: PreparedStep, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return self.decoder.logits(hidden) if rows else hidden


class GuardedForward(PlainForward):
    """Steps with rows that are computed in float32, which looks into every layer."""

    def __init__(self, decoder: Decoder, state: DeviceState, guard: PrecisionGuard) -> None:
        super().__init__(decoder, state)
        self._guard = guard

    def takes(self, step: Step) -> bool:
        return bool(step.in_float32)

    def hidden(self, prepared: PreparedStep) -> torch.Tensor:
        return self._guard.forward(prepared.step, prepared.tokens, self.state.kv)

    def logits(self, prepared: PreparedStep) -> torch.Tensor | None:
        return self.project(prepared, self.hidden(prepared)[prepared.entries], prepared.sample_rows)

    def project(self, prepared: PreparedStep, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if not rows:
            return hidden  # [0, ...]: nobody reads it
        step = prepared.step
        wide = {step.rows[index] for index in step.in_float32}
        return self._guard.logits(hidden, torch.tensor([row in wide for row in rows], device=hidden.device))
