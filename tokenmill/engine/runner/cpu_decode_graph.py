"""RecordedDecode: steps in which every row decodes, with drafts or without, as one call of the native library."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from tokenmill.engine.runner.inputs import block_writes
from tokenmill.engine.runner.paths import FeatureReader, PreparedStep
from tokenmill.engine.runner.recordings import PLAIN
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.verify import REJECTED
from tokenmill.engine.step import Step, only_decodes
from tokenmill.model.decoder import Decoder, Features, TokenBatch
from tokenmill.ops.native.elementwise import copy_into
from tokenmill.ops.native.ops import best_into, choose_into, decode_inputs, pick_into
from tokenmill.ops.native.recording import NotRecordableError, RecordedGraph
from tokenmill.ops.types import AttentionBatch
from tokenmill.quant.schemes.adapters import NO_ADAPTER, RowContext
from tokenmill.sampling.sampler import Sampled, Sampler


class RecordedDecode:
    """What CUDA graphs are to a GPU: the same step without the Python between its ops.

    One recording serves every number of tokens; a draft is one more, of the row that verifies it. It is made at the
    second such step and used once that step's logits agree with those computed plainly; a model that computes anything
    outside the native ops is run plainly.
    """

    def __init__(
        self, decoder: Decoder, state: DeviceState, sampler: Sampler, max_rows: int, adapted: bool = False
    ) -> None:
        """adapted: of steps in which rows have adapters; others are recorded without."""
        self._decoder, self._state, self._sampler = decoder, state, sampler
        self.feature_reader: FeatureReader | None = None  # to be set before the first step
        self._features: _RecordedFeatures | None = None  # of what it reads
        self.capacity = max_rows
        self._adapters = torch.full((max_rows,), NO_ADAPTER) if adapted else None  # written by the host, too
        self._uses = 0
        self._graph: RecordedGraph | None = None
        self._logits: torch.Tensor  # [max_rows, vocab]: where a replay leaves them
        self._hidden: torch.Tensor  # [max_rows, hidden]: and what they were computed from
        # Written by the host before each step.
        self._rows = torch.zeros(max_rows, dtype=torch.int64)
        self._starts = torch.zeros(max_rows, dtype=torch.int64)
        # Where their tokens stand among the slots of their rows: the starts themselves unless rows may be pruned.
        self._places = torch.zeros(max_rows, dtype=torch.int64) if state.pruned else self._starts
        self._unread = torch.zeros(max_rows if state.pruned else 0, dtype=torch.int64)  # ids of no interest
        self._greedy = torch.zeros(1, dtype=torch.int64)
        self._host_rows, self._host_starts = self._rows.numpy(), self._starts.numpy()
        self._host_greedy, self._host_places = self._greedy.numpy(), self._places.numpy()
        self._host_tables = state.block_tables.view(-1).numpy()
        self._host_tokens, self._host_lengths = state.tokens.numpy(), state.lengths.numpy()
        # Written by the first op of a step for the others, and by the last one.
        self._ids = torch.zeros(max_rows, dtype=torch.int64)
        self._slots = torch.zeros(max_rows, dtype=torch.int64)
        self._table_rows = torch.zeros(max_rows, dtype=torch.int32)
        self._context = torch.zeros(max_rows, dtype=torch.int32)
        self._q_start = torch.arange(max_rows + 1, dtype=torch.int32)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64)
        self._bests = torch.zeros(max_rows, 2, dtype=torch.int64)

    def takes(self, step: Step) -> bool:
        if bool(step.adapters) != (self._adapters is not None):
            return False
        return only_decodes(step) and not step.in_float32 and step.num_tokens <= self.capacity

    def run(self, step: Step) -> Sampled | None:
        """Compute and sample the step; None where it has to be run plainly."""
        self._uses += 1
        if self._graph is None and self._uses != 2:
            return None
        n = step.num_tokens
        if step.drafts:
            self._place_drafts(step)
        else:
            self._host_rows[:n] = step.rows
            self._host_starts[:n] = step.starts
        if self._adapters is not None:
            self._adapters[:n] = torch.from_numpy(np.repeat(step.adapters, step.counts))
        if self._state.pruned:
            self._host_places[:n] = self._host_starts[:n] - [step.pruned.get(row, 0) for row in step.rows]
        at, value = block_writes(step, self._state.max_blocks)
        if len(at):
            self._host_tables[at] = value
        traits = self._sampler.traits(step.rows)
        self._host_greedy[0] = traits == PLAIN
        if self._graph is None and not self._record(n):
            return None
        assert self._graph is not None
        self._graph.run(n)
        if traits == PLAIN:
            sampled = Sampled(self._tokens[:n].clone())
        else:
            rows, positions = self._rows[:n], self._starts[:n] + 1
            sampled = self._sampler.sample(self._logits[:n], rows, positions, traits, self._mask_rows(step))
            self._state.tokens[rows, positions] = sampled.tokens.clamp_min(0).int()
        last = self._reject_drafts(step, sampled) if step.drafts else range(n)
        if self._state.hidden is not None:
            entries = torch.tensor(last)
            rows = self._rows[entries]
            self._state.hidden[rows] = self._hidden[entries]
            self._state.hidden_at[rows] = self._starts[entries]
        if self.feature_reader is not None and self._features is not None:
            self.feature_reader.read(self._prepared(step, Features(self._features.layers, self._features.states[:n])))
        return sampled

    def _prepared(self, step: Step, features: Features) -> PreparedStep:
        """The step as one that was not recorded."""
        n = step.num_tokens
        return PreparedStep(
            step,
            self._state,
            self._rows[:n],
            self._starts[:n],
            self._places[:n],
            self._attention(n),
            entries=torch.arange(n),
            all_wanted=True,
            sample_rows=self._host_rows[:n].tolist(),
            features=features,
        )

    def _mask_rows(self, step: Step) -> torch.Tensor | None:
        if not (step.drafts and step.masks):
            return None
        numbers = self._host_starts[: step.num_tokens] - np.repeat(step.starts, step.counts)
        return torch.from_numpy(self._sampler.mask_rows(self._host_rows[: step.num_tokens], numbers))

    def _place_drafts(self, step: Step) -> None:
        """Every token is an entry of its own: the last known one of its row, or a draft behind it."""
        at = 0
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            self._host_rows[at : at + count] = row
            self._host_starts[at : at + count] = range(start, start + count)
            if count > 1:
                drafts = step.drafts[row][: count - 1]
                self._host_tokens[row, start + 1 : start + count] = 0
                self._host_tokens[row, start + 1 : start + 1 + len(drafts)] = drafts
            at += count

    def _reject_drafts(self, step: Step, sampled: Sampled) -> list[int]:
        """Mark what was sampled behind a draft that did not hold; returns each row's last entry that counts."""
        tokens = sampled.tokens.numpy()
        at, last = 0, []
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            held = 0
            if count > 1:
                said, drafts = tokens[at : at + count].tolist(), step.drafts[row][: count - 1]
                while held < len(drafts) and said[held] == drafts[held]:
                    held += 1
                tokens[at + held + 1 : at + count] = REJECTED
            self._host_lengths[row] = start + held + 2
            last.append(at + held)
            at += count
        sampled.mark_rejected()
        return last

    def _record(self, n: int) -> bool:
        """Make the graph, and keep it if it computes for this step's rows what the ops compute one by one."""
        graph = RecordedGraph(self.capacity)
        if self.feature_reader is not None:
            room = self._decoder.features(self.feature_reader.layers, self.capacity)
            self._features = _RecordedFeatures(room.layers, room.states)
        try:
            with graph.record():
                decode_inputs(
                    self._rows, self._starts, self._state.tokens, self._state.block_tables, self._state.block_size,
                    self._ids, self._slots, self._table_rows, self._context,
                )  # fmt: skip
                if self._state.pruned:
                    decode_inputs(
                        self._rows, self._places, self._state.tokens, self._state.block_tables, self._state.block_size,
                        self._unread, self._slots, self._table_rows, self._context,
                    )  # fmt: skip
                self._hidden, self._logits = self._decode(self.capacity)
                self._choose()
        except NotRecordableError as error:
            warnings.warn(f"decode steps cannot be recorded and are run plainly: {error}", stacklevel=2)
            return False
        graph.run(n)
        replayed = self._logits[:n].clone()
        _, plain = self._decode(n)
        if not agree(replayed, plain):
            warnings.warn(
                f"decode steps cannot be recorded and are run plainly: recorded logits differ from plain ones by up to "
                f"{float((replayed - plain).abs().max()):.3g}",
                stacklevel=2,
            )
            return False
        self._graph = graph
        return True

    def _choose(self) -> None:
        """The likeliest tokens, where no row wants anything else; of each rank's first."""
        part, state = self._sampler.part, (self._greedy, self._rows, self._starts, self._state.tokens)
        if part is None:
            choose_into(self._tokens, self._logits, *state)
            return
        best_into(self._bests, self._logits, self._greedy, part.tokens.start)
        pick_into(self._tokens, part.ranks.all_gather(self._bests), *state)

    def _decode(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:  # [n, hidden], [n, vocab]
        """The forward pass in terms of the static inputs."""
        tokens = TokenBatch(self._ids[:n], self._starts[:n], self._slots[:n], self._attention(n))
        tokens.context = None if self._adapters is None else RowContext(self._adapters[:n])
        tokens.features = self._features if n == self.capacity else None
        tokens.enters = None if self._state.entering is None else self._state.entering[:n]
        hidden = self._decoder.forward(tokens, self._state.kv)
        return hidden, self._decoder.logits(hidden, wide=False)

    def _attention(self, n: int) -> AttentionBatch:
        return AttentionBatch(
            rows=self._table_rows[:n],
            q_start=self._q_start[: n + 1],
            context=self._context[:n],
            block_tables=self._state.block_tables,
            num_singles=n,
            max_query=1,
            max_context=self._state.max_len,
            host_rows=self._host_rows[:n].tolist(),
            host_counts=[1] * n,
            host_context=(self._host_places[:n] + 1).tolist(),
        )


class _RecordedFeatures(Features):
    """Kept by an op of the library."""

    def keep(self, index: int, residual: torch.Tensor) -> None:  # [tokens, hidden]
        if index in self.layers:
            copy_into(residual, self.of(index))


def agree(replayed: torch.Tensor, plain: torch.Tensor) -> bool:
    """Up to the last bits: torch may have computed some op of the plain step in another order."""
    scale = float(plain.abs().max())
    return not np.isfinite(scale) or bool((replayed - plain).abs().max() <= 1e-4 * scale)
