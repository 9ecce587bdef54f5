"""RecordedStage: what a stage that does not sample computes of a step, as one call of the native library on a CPU."""

from __future__ import annotations

import warnings

import torch

from tokenmill.engine.runner.cpu_decode_graph import agree
from tokenmill.engine.runner.cpu_prompt_graphs import StepInputs, beginning_of
from tokenmill.engine.runner.state import DeviceState
from tokenmill.model.decoder import Decoder, TokenBatch
from tokenmill.ops.native.recording import NotRecordableError, RecordedGraph


class RecordedStage:
    """One graph serves steps of every shape. It is made at the second step, and held against the plain computation; a
    model that computes anything outside the native ops is run plainly.
    """

    def __init__(
        self, decoder: Decoder, state: DeviceState, max_rows: int, max_tokens: int, adapted: bool = False
    ) -> None:
        """adapted: of steps in which rows have adapters."""
        self._decoder, self._state = decoder, state
        self._inputs = StepInputs(state, max_rows, max_tokens, adapted)
        self._uses = 0
        self._refused = False
        self._graph: RecordedGraph | None = None
        self._hidden: torch.Tensor  # [max_tokens, hidden]: where a replay leaves them

    def hidden(self, tokens: TokenBatch) -> torch.Tensor | None:  # [tokens, hidden]
        """Overwritten by the next step. None: the step has to be computed plainly."""
        self._uses += 1
        if self._refused or self._uses < 2:
            return None
        count = self._inputs.take(tokens)
        if self._graph is not None:
            self._graph.run(count)
        elif not self._record(tokens):
            self._graph, self._refused = None, True
            return None
        return self._hidden[:count]

    def _record(self, tokens: TokenBatch) -> bool:
        self._graph = RecordedGraph(self._inputs.max_tokens)
        try:
            with self._graph.record():
                self._hidden = self._decoder.leave(self._inputs.largest(tokens.attention), self._state.kv)
        except NotRecordableError as error:
            warnings.warn(f"steps of this stage cannot be recorded and are run plainly: {error}", stacklevel=2)
            return False
        self._graph.run(len(tokens.ids))
        first = beginning_of(tokens)
        if not agree(self._hidden[: len(first.ids)], self._decoder.leave(first, self._state.kv)):
            warnings.warn("steps of this stage are run plainly: their recording differs from them", stacklevel=2)
            return False
        return True
