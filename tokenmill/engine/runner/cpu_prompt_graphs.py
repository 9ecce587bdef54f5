"""RecordedChunks: steps that read prompts, as two calls of the native library on a CPU."""

from __future__ import annotations

import warnings

import torch

from tokenmill.engine.runner.cpu_decode_graph import agree
from tokenmill.engine.runner.paths import PlainForward, PreparedStep
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.step import Step
from tokenmill.model.decoder import Attended, Decoder, TokenBatch
from tokenmill.ops.native.ops import embed
from tokenmill.ops.native.recording import NotRecordableError, RecordedGraph
from tokenmill.ops.types import AttentionBatch
from tokenmill.quant.schemes.adapters import NO_ADAPTER, RowContext

_COMPARED = 32  # tokens that a new recording is held against the plain computation with


class StepInputs:
    """Static inputs of recordings that serve steps of every shape, written before each step."""

    def __init__(self, state: DeviceState, max_rows: int, max_tokens: int, adapted: bool = False) -> None:
        self._adapters = torch.full((max_tokens,), NO_ADAPTER) if adapted else None
        self._state, self._max_rows, self.max_tokens = state, max_rows, max_tokens
        self._ids, self._positions, self._slots = (torch.zeros(max_tokens, dtype=torch.int64) for _ in range(3))
        self._rows, self._context = (torch.zeros(max_rows, dtype=torch.int32) for _ in range(2))
        self._q_start = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._counts = torch.zeros(2, dtype=torch.int64)

    def take(self, tokens: TokenBatch) -> int:
        """A step's inputs; returns how many tokens it has."""
        batch, count = tokens.attention, len(tokens.ids)
        rows = len(batch.rows)
        self._ids[:count], self._positions[:count], self._slots[:count] = tokens.ids, tokens.positions, tokens.slots
        self._rows[:rows], self._context[:rows], self._q_start[: rows + 1] = batch.rows, batch.context, batch.q_start
        self._counts[0], self._counts[1] = rows, batch.num_singles
        if self._adapters is not None and tokens.context is not None:
            self._adapters[:count] = tokens.context.adapter
        return count

    def largest(self, like: AttentionBatch) -> TokenBatch:
        """The static inputs, as a step that needs all their room."""
        attention = AttentionBatch(
            rows=self._rows,
            q_start=self._q_start,
            context=self._context,
            block_tables=like.block_tables,
            num_singles=self._max_rows,
            max_query=self.max_tokens,
            max_context=self._state.max_len,
            host_rows=[],
            host_counts=[],
            host_context=[],
            counts=self._counts,
        )
        context = None if self._adapters is None else RowContext(self._adapters)
        enters = self._state.entering
        return TokenBatch(self._ids, self._positions, self._slots, attention, context=context, enters=enters)


class RecordedChunks(PlainForward):
    """The Python between the ops of a step takes as long as several tokens: it is left out from the second step on.

    One graph computes all tokens up to the last layer's attention, another one goes on with those that are sampled
    from. They serve steps of any shape. A model that computes anything outside the native ops is run plainly.
    """

    def __init__(
        self, decoder: Decoder, state: DeviceState, max_rows: int, max_tokens: int, adapted: bool = False
    ) -> None:
        """adapted: of steps in which rows have adapters; others are recorded without."""
        super().__init__(decoder, state)
        self._decoder, self._state, self._max_rows = decoder, state, max_rows
        self._uses = 0
        self._refused = False
        self._graphs: tuple[RecordedGraph, RecordedGraph] | None = None
        self._logits: torch.Tensor  # [max_rows, vocab]: where a replay leaves them
        self._inputs = StepInputs(state, max_rows, max_tokens, adapted)
        self._wanted_adapters = torch.full((max_rows,), NO_ADAPTER) if adapted else None
        self._wanted = torch.zeros(max_rows, dtype=torch.int64)  # written before each step, too

    def takes(self, step: Step) -> bool:
        fits = bool(step.adapters) == (self._wanted_adapters is not None)
        return fits and not (self._refused or step.wants_hidden)

    def logits(self, prepared: PreparedStep) -> torch.Tensor | None:  # [entries, vocab]
        """Overwritten by the next step. None: the step has to be run plainly."""
        tokens, wanted = prepared.tokens, prepared.entries
        self._uses += 1
        if self._uses < 2 or len(wanted) > self._max_rows or tokens.attention.tree is not None:
            return None
        count = self._inputs.take(tokens)
        self._wanted[: len(wanted)] = wanted
        if self._wanted_adapters is not None and tokens.context is not None:
            self._wanted_adapters[: len(wanted)] = tokens.context.pick(wanted).adapter
        if self._graphs is not None:
            self._graphs[0].run(count)
        elif not self._record(tokens):
            self._graphs, self._refused = None, True
            return None
        assert self._graphs is not None
        if len(wanted):
            self._graphs[1].run(len(wanted))
        return self._logits[: len(wanted)]

    def _record(self, tokens: TokenBatch) -> bool:
        """Make the graphs and run the first; whether this step's first tokens get what the ops compute one by one."""
        begin, end = RecordedGraph(self._inputs.max_tokens), RecordedGraph(self._max_rows)
        try:
            with begin.record():
                attended = self._decoder.begin(self._inputs.largest(tokens.attention), self._state.kv)
                mixed, residual = (one.view(len(one), -1) for one in attended.take())
            with end.record():
                some = embed(self._wanted, mixed).view(self._max_rows, self._decoder.spec.heads, -1)
                context = None if self._wanted_adapters is None else RowContext(self._wanted_adapters)
                last = Attended(attended.index, attended.layer, some, embed(self._wanted, residual), context)
                hidden = self._decoder.end(last)
                self._logits = self._decoder.logits(hidden, wide=False)
        except NotRecordableError:  # decode steps, which need it more, warn of the same
            return False
        self._graphs = begin, end
        first = beginning_of(tokens)
        begin.run(len(tokens.ids))
        kept = int(self._wanted[0])
        self._wanted[0] = len(first.ids) - 1
        if self._wanted_adapters is not None and first.context is not None:
            of_first = self._wanted_adapters[0].item()
            self._wanted_adapters[0] = first.context.adapter[-1]
            end.run(1)
            self._wanted_adapters[0] = of_first
        else:
            end.run(1)
        self._wanted[0] = kept
        plain = self._decoder.logits(self._decoder.forward(first, self._state.kv)[-1:], wide=False)
        if not agree(self._logits[:1], plain):
            warnings.warn("steps that read prompts are run plainly: their recording differs from them", stacklevel=2)
            return False
        return True


def beginning_of(tokens: TokenBatch) -> TokenBatch:
    """The first few tokens of the first row: what they give does not depend on those that follow."""
    batch = tokens.attention
    count = min(_COMPARED, int(batch.q_start[1]))
    context = int(batch.context[0]) - int(batch.q_start[1]) + count
    attention = AttentionBatch(
        rows=batch.rows[:1],
        q_start=torch.tensor([0, count], dtype=torch.int32),
        context=torch.tensor([context], dtype=torch.int32),
        block_tables=batch.block_tables,
        num_singles=min(1, batch.num_singles),  # a chunk's last token may be alone, but is no single
        max_query=count,
        max_context=context,
        host_rows=batch.host_rows[:1],
        host_counts=[count],
        host_context=[context],
    )
    enters = None if tokens.enters is None else tokens.enters[:count]
    adapters = None if tokens.context is None else RowContext(tokens.context.adapter[:count])
    some = tokens.ids[:count], tokens.positions[:count], tokens.slots[:count]
    return TokenBatch(*some, attention, context=adapters, enters=enters)
