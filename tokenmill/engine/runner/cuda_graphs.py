"""DecodeGraphs: steps in which every row decodes, with drafts or without, recorded once per batch size and replayed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from tokenmill.engine.runner.capture import Capture
from tokenmill.engine.runner.drafters import Drafter, TreeDrafter, Verified, VerifiedTrees
from tokenmill.engine.runner.inputs import Ints, block_writes, draft_columns, shared_lengths
from tokenmill.engine.runner.recordings import (
    PLAIN,
    TREE_ROWS,
    WIDTHS,
    Kind,
    Recording,
    Recordings,
    bucket_sizes,
    chains_for,
)
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.verify import COLUMNS, REJECTED
from tokenmill.engine.step import (
    DRAFTED,
    FANOUT,
    ON_TREE,
    SharedPrefix,
    Step,
    is_speculative,
    only_decodes,
)
from tokenmill.model.decoder import Decoder, TokenBatch
from tokenmill.ops.types import AttentionBatch, DecodeInputs
from tokenmill.sampling.sampler import Sampled, Sampler
from tokenmill.sampling.settings import Traits

INPUTS = 13  # integers per row that a step may bring
PROPOSED = 2  # tokens that may be proposed per token of a step: some stand where rows may already be


class _Staging:
    """Pinned memory that the host writes while older steps are still being copied from the other buffers."""

    def __init__(self, words: int, buffers: int = 4) -> None:
        self._buffers = [torch.empty(words, dtype=torch.int64, pin_memory=True) for _ in range(buffers)]
        self._copied = [torch.cuda.Event() for _ in range(buffers)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, parts: list[Ints], target: torch.Tensor) -> torch.Tensor:
        """Start the copy of these parts, one after the other, to the beginning of `target`; returns that."""
        self._turn = (self._turn + 1) % len(self._buffers)
        copied = self._copied[self._turn]
        if not copied.query():  # type: ignore[no-untyped-call]
            copied.synchronize()  # more steps are under way than there are buffers
        count = sum(map(len, parts))
        buffer = self._buffers[self._turn][:count]
        np.concatenate(parts, out=buffer.numpy())
        target = target[:count]
        target.copy_(buffer, non_blocking=True)
        copied.record()
        return target


class _Columns:
    """The inputs that seldom change from step to step, as arrays: rows, and who shares a prefix."""

    def __init__(self, scratch_row: int) -> None:
        self._scratch_row = scratch_row
        self._rows: list[int] = []
        self._rows_column: Ints = np.zeros(0, dtype=np.int64)
        self._shared: tuple[SharedPrefix, int] | None = None
        self._shared_columns: list[Ints] = []

    def rows(self, rows: list[int], bucket: int) -> Ints:  # [bucket]
        """Padding rows point at the scratch row."""
        if bucket != len(self._rows_column) or rows != self._rows:
            self._rows = rows
            self._rows_column = np.full(bucket, self._scratch_row, dtype=np.int64)
            self._rows_column[: len(rows)] = rows
        return self._rows_column

    def shared(self, shared: SharedPrefix, bucket: int) -> list[Ints]:  # [bucket] members (-1 after them), tokens
        if self._shared is None or self._shared[0] is not shared or self._shared[1] != bucket:
            members = np.full(bucket, -1, dtype=np.int64)
            members[: len(shared.members)] = shared.members
            self._shared = shared, bucket
            self._shared_columns = [members, shared_lengths(shared, bucket)]
        return self._shared_columns


class DecodeGraphs:
    """Input preparation, forward pass, sampling and the write to the token table in one replay.

    The host sends rows, positions and new block table entries in one copy. Some sizes are recorded by the warm-up, and
    serve others until those have returned often enough for a recording of their own (`Recordings`). What nothing larger
    serves is run plainly the first time and recorded the second time.
    """

    def __init__(self, decoder: Decoder, state: DeviceState, sampler: Sampler, max_rows: int) -> None:
        self._decoder, self._state, self._sampler = decoder, state, sampler
        self.recordings = Recordings[torch.cuda.CUDAGraph](bucket_sizes(max_rows))
        self.replays = self.plain_runs = 0  # steps so far
        self.drafter: Drafter | None = None  # drafts behind every step that verifies drafts
        self.tree_drafter: TreeDrafter | None = None  # and this one behind those that verify trees
        self.feature_layers: tuple[int, ...] = ()  # of which the drafter reads what they start from
        self.steps_of = dict.fromkeys(Kind, 0)
        self._traits = PLAIN
        device = state.tokens.device
        # [rows | starts | members of the shared prefix | its length], each as long as the bucket, the last two only
        # where there is one; then [block_at | block_value]. With drafts `draft_columns`, then where entries' masks
        # are, then proposed tokens, then the same.
        self._inputs = torch.zeros(INPUTS * max_rows, dtype=torch.int64, device=device)
        self._staging = _Staging(INPUTS * max_rows)
        self._columns = _Columns(state.scratch_row)
        self._capture = Capture(device)
        self._one_query_each = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def takes(self, step: Step) -> bool:
        """Whether every row of the step decodes and nothing else happens, and there is room for what it brings."""
        largest = self.recordings.sizes[-1]
        is_other = step.in_float32 or step.adapters or step.pruned
        if is_other or not only_decodes(step) or step.num_tokens > largest:
            return False
        self._traits = self._sampler.traits(step.rows)
        if not self._sampler.recordable(self._traits):
            return False
        if not is_speculative(step):
            return True
        proposed, blocks = sum(map(len, step.drafts.values())), sum(len(blocks) for _, _, blocks in step.blocks)
        # (Padded chains have room for more.)
        return proposed <= PROPOSED * step.num_tokens and COLUMNS + 1 + PROPOSED + 2 * blocks / largest <= INPUTS

    def run(self, step: Step) -> Sampled:  # [tokens, with those that pad chains], overwritten by the next run
        """Launch the step that was just asked for."""
        traits, rows = self._traits, len(step.rows)
        kind = self._kind_of(step, traits)
        self.steps_of[kind] += 1
        tokens = kind.kept * rows if kind.width > 1 else step.num_tokens  # that may come out
        bucket, recording = self.recordings.serve(tokens // kind.kept, traits, kind)
        self._send(step, bucket, kind)
        recording.uses += 1
        if self.recordings.is_due(recording):
            self._record(recording, bucket, traits, kind)
        if recording.graph is None or recording.sampled is None:
            self.plain_runs += 1
            return self._decode(bucket, traits, kind).first(tokens, kind.kept)
        self.replays += 1
        recording.graph.replay()
        return recording.sampled.first(tokens, kind.kept)

    def _kind_of(self, step: Step, traits: Traits) -> Kind:
        if not is_speculative(step):
            return Kind.PLAIN if step.shared is None else Kind.SHARED
        bucket = self.recordings.next_size(len(step.rows))
        # What shapes logits may read the tokens before a position, where siblings cannot all stand.
        if step.tree and not traits.shaped and self.fits(bucket, Kind.TREES):
            return Kind.TREES
        kind = chains_for(step)
        return kind if self.fits(bucket, kind) else Kind.DRAFTS

    def fits(self, bucket: int, kind: Kind) -> bool:
        if kind is Kind.TREES and (self.tree_drafter is None or bucket > TREE_ROWS):
            return False
        return bucket * kind.width <= self.recordings.sizes[-1]

    def rehearse(self, bucket: int, traits: Traits, kind: Kind) -> None:
        """Run a step of so many rows that belong to nobody, plainly."""
        if not self.fits(bucket, kind):
            return
        self._inputs.zero_()
        self._decode(bucket, traits, kind)

    def record_ahead(self, bucket: int, traits: Traits, kind: Kind) -> None:
        """Record a step of so many rows before anybody needs it; what it runs has been rehearsed."""
        recording = self.recordings.of(bucket, traits, kind)
        if recording.graph is None and not recording.refused and self.fits(bucket, kind):
            self._record(recording, bucket, traits, kind)

    def _send(self, step: Step, bucket: int, kind: Kind) -> None:
        """One copy to the device, and new entries of the block tables where rows grew."""
        if kind is Kind.TREES:
            parts = self._tree_inputs(step, bucket)
        elif is_speculative(step):
            parts = self._draft_inputs(step, bucket * kind.width, kind.width)
        else:
            starts = np.zeros(bucket, dtype=np.int64)
            starts[: len(step.starts)] = step.starts
            parts = [self._columns.rows(step.rows, bucket), starts]
        if step.shared is not None:
            parts += self._columns.shared(step.shared, bucket)
        block_at, block_value = block_writes(step, self._state.max_blocks)
        inputs = self._staging.send([*parts, block_at, block_value], self._inputs)
        if len(block_at):
            at, value = inputs[sum(map(len, parts)) :].chunk(2)
            self._state.write_blocks(at, value)

    def _draft_inputs(self, step: Step, entries: int, width: int) -> list[Ints]:
        """[(COLUMNS + 1) * entries], [PROPOSED * entries]; with a width every row has that many entries."""
        told, proposed = draft_columns(step)
        columns = np.zeros((COLUMNS + 1, entries), dtype=np.int64)
        columns[[0, COLUMNS]] = self._state.scratch_row
        at: Ints | slice = slice(told.shape[1])
        if width > 1:
            at = np.repeat(np.arange(0, width * len(step.rows), width), step.counts) + told[2]
        columns[:COLUMNS, at] = told
        columns[COLUMNS, at] = self._sampler.mask_rows(told[0], told[2])
        tokens = np.zeros(PROPOSED * entries, dtype=np.int64)
        tokens[: len(proposed)] = proposed
        return [columns.reshape(-1), tokens]

    def _tree_inputs(self, step: Step, bucket: int) -> list[Ints]:  # see `reference_tree.tree_inputs`
        """[COLUMNS * bucket], [PROPOSED * Kind.TREES.kept * bucket]"""
        told = np.zeros((COLUMNS, bucket), dtype=np.int64)
        told[0] = self._state.scratch_row
        tokens = np.zeros(PROPOSED * Kind.TREES.kept * bucket, dtype=np.int64)
        end = 0
        for at, (row, start, samples) in enumerate(zip(step.rows, step.starts, step.samples, strict=True)):
            first, drafts = end, step.drafts.get(row, [])
            grown = samples == 1 + DRAFTED and drafts[-1] == ON_TREE
            if not grown:
                end += len(drafts)
                tokens[first:end] = drafts
            told[:, at] = row, start, first, end, row in step.slack, -1 if grown else samples - 1
        return [told.reshape(-1), tokens]

    def _record(self, recording: Recording[torch.cuda.CUDAGraph], bucket: int, traits: Traits, kind: Kind) -> None:
        try:
            with self._capture.recording():
                self._capture.begin()
                recording.sampled = self._decode(bucket, traits, kind)
                recording.graph = self._capture.end()
        except RuntimeError as error:  # slower, but the answers go on
            recording.refused = True
            if self.recordings.empty:
                self._capture.renew()
            tokens = bucket * kind.width
            warnings.warn(f"steps of {tokens} tokens cannot be recorded and are run plainly: {error}", stacklevel=2)

    def _decode(self, bucket: int, traits: Traits, kind: Kind) -> Sampled:  # [bucket]
        """The whole step in terms of the static inputs."""
        if kind is Kind.TREES:
            return self._verify_trees(bucket, traits)
        if kind is Kind.DRAFTS or kind in WIDTHS:
            return self._verify(bucket * kind.width, traits, kind.width)
        rows, starts = self._inputs[: 2 * bucket].chunk(2)
        shared = self._inputs[2 * bucket : 4 * bucket].int().chunk(2) if kind is Kind.SHARED else (None, None)
        ops, tables = self._decoder.ops, self._state.decode_tables
        inputs = ops.decode_inputs(tables, rows, starts)
        sampled = self._sample(inputs, rows, traits, *shared)[2]
        ops.keep_sampled(tables, rows, inputs, sampled.tokens)
        return sampled

    def _verify(self, bucket: int, traits: Traits, width: int) -> Sampled:  # [bucket]
        """Drafts are tokens like any others: every one is a row of its own to all but attention."""
        columns = self._inputs[: (COLUMNS + 1) * bucket].view(COLUMNS + 1, bucket)
        rows, starts, numbers, mask_rows = columns[0], columns[1], columns[2], columns[COLUMNS]
        proposed = self._inputs[(COLUMNS + 1) * bucket :][: PROPOSED * bucket]
        ops, tables = self._decoder.ops, self._state.decode_tables
        inputs = ops.decode_inputs(tables, rows, starts, (columns[2:COLUMNS], proposed))
        batch, hidden, sampled = self._sample(inputs, rows, traits, mask_rows=mask_rows, queries=width, verifies=True)
        said = sampled.tokens.clamp_min(0) if self.drafter is not None else None
        last = ops.keep_sampled(tables, rows, inputs, sampled.tokens, numbers, REJECTED)
        sampled.mark_rejected()
        if self.drafter is not None and said is not None and last is not None:
            with self._costs_no_answer():
                self.drafter.draft(Verified(inputs, hidden, said, last, traits, width, batch))
        return sampled

    def _verify_trees(self, bucket: int, traits: Traits) -> Sampled:  # [bucket * Kind.TREES.kept]
        """Nodes are rows of their own to all but attention; what comes out is the path that held."""
        told = self._inputs[: COLUMNS * bucket].view(COLUMNS, bucket)
        proposed = self._inputs[COLUMNS * bucket :][: PROPOSED * Kind.TREES.kept * bucket]
        ops, state, rows = self._decoder.ops, self._state, told[0]
        tables = state.decode_tables
        inputs = ops.tree_inputs(tables, state.trees, told, proposed)
        queries, tails = Kind.TREES.width, inputs.tails
        _, hidden, sampled = self._sample(inputs.entries, inputs.entries.rows, traits, queries=queries, tails=tails)
        kept = ops.keep_tree(tables, rows, inputs, sampled.tokens, FANOUT, REJECTED)
        ops.move_kv(state.arena, state.scales, tables, rows, kept)
        logprobs = None if sampled.logprobs is None else sampled.logprobs.index_select(0, kept.order)
        out = Sampled(kept.tokens, logprobs)
        out.mark_rejected()
        if self.tree_drafter is not None:
            last = hidden.index_select(0, kept.last)
            with self._costs_no_answer():
                self.tree_drafter.grow(VerifiedTrees(last, kept.newest, kept.positions, rows, traits))
        return out

    @contextlib.contextmanager
    def _costs_no_answer(self) -> Iterator[None]:
        """A drafter that fails is switched off, and whoever asks for drafts hears of it."""
        try:
            yield
        except Exception as error:
            if self.drafter is not None:
                self.drafter.failure = error
            self.drafter = self.tree_drafter = None

    def _sample(
        self,
        inputs: DecodeInputs,  # [bucket]
        rows: torch.Tensor,
        traits: Traits,
        members: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        mask_rows: torch.Tensor | None = None,
        queries: int = 1,
        tails: torch.Tensor | None = None,
        verifies: bool = False,
    ) -> tuple[TokenBatch, torch.Tensor, Sampled]:  # what was computed, [bucket, hidden], [bucket]
        state, bucket = self._state, len(rows)
        attention = AttentionBatch(
            rows=inputs.rows,
            q_start=self._one_query_each[: bucket + 1],
            context=inputs.context,
            block_tables=state.block_tables,
            num_singles=bucket,
            max_query=1,
            max_context=state.max_len,  # a recording must serve any context
            host_rows=[0] * bucket,
            host_counts=[1] * bucket,
            host_context=[state.max_len] * bucket,
            shared_members=members,
            shared_tokens=lengths,
            queries=queries,
            tails=tails,
            fanout=1 if tails is None else FANOUT,
        )
        batch = TokenBatch(inputs.ids, inputs.positions, inputs.slots, attention)
        if verifies and self.feature_layers:
            batch.features = self._decoder.features(self.feature_layers, bucket)
        hidden = self._decoder.forward(batch, state.kv)
        logits = self._decoder.logits(hidden, wide=False)
        return batch, hidden, self._sampler.sample(logits, rows, inputs.positions + 1, traits, mask_rows)
