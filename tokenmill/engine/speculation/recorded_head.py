"""RecordedHead: a draft head as calls of the native library: one to enter, and one for every token that is drafted."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.speculation.head_runner import Behind, HeadRunner, single_queries
from tokenmill.model.decoder import Decoder
from tokenmill.ops.native.elementwise import copy_into
from tokenmill.ops.native.ops import sample
from tokenmill.ops.native.recording import RecordedGraph
from tokenmill.ops.types import SampleBatch

_Step = tuple[RecordedGraph, torch.Tensor, torch.Tensor]  # with where it leaves logits, and the places of the best


class RecordedHead:
    """What `HeadRunner` computes, without Python between its ops. States stay in place from one token to the next."""

    def __init__(self, head: HeadRunner, decoder: Decoder, width: int, tables: DeviceState) -> None:
        max_rows, hidden = len(tables.tokens), decoder.spec.hidden
        self._hidden, self._ids = torch.zeros(max_rows, hidden), torch.zeros(max_rows, dtype=torch.int64)
        self._both = both = torch.zeros(max_rows, width + hidden)  # a state, and the embedding of the token behind it
        state = both[:, :width]
        self._enter = RecordedGraph(max_rows)
        self._rows, self._context = (torch.zeros(max_rows, dtype=torch.int32) for _ in range(2))
        self._positions = torch.zeros(max_rows, dtype=torch.int64)
        each = torch.arange(max_rows + 1, dtype=torch.int32)
        self._behind = Behind(self._positions, single_queries(tables, self._rows, self._context, each))
        none = torch.zeros(0)
        greedy = SampleBatch(none, none, none, none, none, none, all_greedy=True, any_filter=False)
        with self._enter.record():
            copy_into(head.enter(self._hidden), state)

        def recorded(behind: Behind | None) -> _Step:
            graph = RecordedGraph(max_rows)
            with graph.record():
                embedding, _ = decoder.embed(self._ids).take()
                copy_into(embedding, both[:, width:])
                _, logits = head.mix(both, state, behind)
                return graph, logits, sample(logits, greedy)

        self._next = recorded(None)
        self._first = self._next
        if head.attends:
            self._first = recorded(self._behind)
        self._step = self._first

    def enter(self, hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Hidden states [n, hidden] of these rows; and where the tokens stand that come next, behind what is cached."""
        n = len(hidden)
        self._hidden[:n] = hidden
        self._rows[:n], self._context[:n], self._positions[:n] = rows, positions, positions
        self._enter.run(n)
        self._step = self._first

    def step(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that come next [n] -> logits [n, draft vocabulary], and the place of the best [n], until the next."""
        (graph, logits, best), self._step = self._step, self._next
        n = len(ids)
        self._ids[:n] = ids
        graph.run(n)
        return logits[:n], best[:n]


def chances(logits: torch.Tensor, places: torch.Tensor) -> np.ndarray:  # [n, draft vocabulary], [n] -> [n]
    """Of what was chosen, in the head's own eyes."""
    rows = logits.numpy()
    chosen = rows[np.arange(len(rows)), places.numpy()]
    likely: np.ndarray = 1 / np.exp(rows - chosen[:, None]).sum(1)
    return likely
