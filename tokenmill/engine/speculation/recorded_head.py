"""RecordedHead: a draft head as calls of the native library: one to enter, and one for every token that is drafted."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.engine.speculation.head_runner import HeadRunner
from tokenmill.model.decoder import Decoder
from tokenmill.ops.native.elementwise import copy_into
from tokenmill.ops.native.ops import sample
from tokenmill.ops.native.recording import RecordedGraph
from tokenmill.ops.types import SampleBatch


class RecordedHead:
    """What `HeadRunner` computes, without Python between its ops. States stay in place from one token to the next."""

    def __init__(self, head: HeadRunner, decoder: Decoder, width: int, max_rows: int) -> None:
        self._head, hidden = head, decoder.spec.hidden
        self._hidden, self._ids = torch.zeros(max_rows, hidden), torch.zeros(max_rows, dtype=torch.int64)
        self._both = both = torch.zeros(max_rows, width + hidden)  # a state, and the embedding of the token behind it
        state = both[:, :width]
        self._enter, self._step = RecordedGraph(max_rows), RecordedGraph(max_rows)
        none = torch.zeros(0)
        greedy = SampleBatch(none, none, none, none, none, none, all_greedy=True, any_filter=False)
        with self._enter.record():
            copy_into(head.enter(self._hidden), state)
        with self._step.record():
            embedding, _ = decoder.embed(self._ids).take()
            copy_into(embedding, both[:, width:])
            _, self._logits = head.mix(both, state)
            self._best = sample(self._logits, greedy)

    def enter(self, hidden: torch.Tensor) -> None:  # [n, hidden]
        self._hidden[: len(hidden)] = hidden
        self._enter.run(len(hidden))

    def step(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that come next [n] -> logits [n, draft vocabulary], and the place of the best [n], until the next."""
        n = len(ids)
        self._ids[:n] = ids
        self._step.run(n)
        return self._logits[:n], self._best[:n]


def chances(logits: torch.Tensor, places: torch.Tensor) -> np.ndarray:  # [n, draft vocabulary], [n] -> [n]
    """Of what was chosen, in the head's own eyes."""
    rows = logits.numpy()
    chosen = rows[np.arange(len(rows)), places.numpy()]
    likely: np.ndarray = 1 / np.exp(rows - chosen[:, None]).sum(1)
    return likely
