"""DecodeGraphs: steps in which every row decodes, with drafts or without, recorded once per batch size and replayed."""

from __future__ import annotations

import enum
import warnings
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from tokenmill.engine.runner.capture import Capture
from tokenmill.engine.runner.inputs import Ints, block_writes, draft_columns, shared_lengths
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.verify import COLUMNS, REJECTED
from tokenmill.engine.step import SharedPrefix, Step, is_speculative, only_decodes
from tokenmill.model.decoder import Decoder, TokenBatch
from tokenmill.ops.types import AttentionBatch, DecodeInputs
from tokenmill.sampling.sampler import Sampled, Sampler
from tokenmill.sampling.settings import Traits

INPUTS = 13  # integers per row that a step may bring
PROPOSED = 2  # tokens that may be proposed per token of a step: some stand where rows may already be
STRETCH = 2  # a size without a recording may be padded to so many times its rows: a replay costs no launches
PLAIN = Traits()
PATIENCE = 4  # times that happens before a size gets a recording of its own, which costs about two plain runs

Graph = TypeVar("Graph")


class Kind(enum.Enum):
    """What a recorded step does besides decoding."""

    PLAIN = "plain"
    SHARED = "shared"  # rows share a beginning, which is read once
    DRAFTS = "drafts"  # rows start where the device says and verify drafts: a size counts tokens, not rows
    # The same, with as many tokens of every row: its keys are read once for all of them
    CHAINS_OF_2 = "chains of 2"
    CHAINS_OF_3 = "chains of 3"
    CHAINS_OF_5 = "chains of 5"

    @property
    def width(self) -> int:
        """Tokens of each row; those that a row lacks are padded."""
        return WIDTHS.get(self, 1)


WIDTHS = {Kind.CHAINS_OF_2: 2, Kind.CHAINS_OF_3: 3, Kind.CHAINS_OF_5: 5}
CHAINS_FILL = 0.6  # of the tokens of chains at least so many are no padding


def chains_for(step: Step) -> Kind:
    """How a step that verifies drafts is recorded."""
    longest, least = max(step.counts), CHAINS_FILL * len(step.counts)
    for kind, width in WIDTHS.items():
        if longest <= width:
            return kind if step.num_tokens >= least * width else Kind.DRAFTS
    return Kind.DRAFTS


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes that are recorded; a step is padded to the next one. Finer where a row more costs relatively more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass
class Recording(Generic[Graph]):
    """What is known of steps of one size."""

    uses: int = 0  # runs at this size
    lent: int = 0  # steps of this size that a larger recording served
    refused: bool = False  # could not be recorded: it is run plainly
    graph: Graph | None = None
    sampled: Sampled | None = None  # [bucket]: where a replay leaves the sampled tokens


@dataclass
class Recordings(Generic[Graph]):
    """Which recording serves a step, and when a size gets one of its own.

    A batch that ends passes through every size for a step or two. To run each plainly and then to record it would cost
    the host's launches in every one of these steps, so a larger size takes them in at first.
    """

    sizes: list[int]  # ascending
    stretch: float = STRETCH
    warm: bool = False  # whether steps of every size have been run before the first request
    _of: dict[tuple[int, Traits, Kind], Recording[Graph]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return all(recording.graph is None for recording in self._of.values())

    def is_due(self, recording: Recording[Graph]) -> bool:
        """Whether a step that is about to run is to be recorded first: its size has returned, and libraries know it."""
        returned = recording.uses > 1 or (self.warm and recording.lent >= PATIENCE)
        return returned and recording.graph is None and not recording.refused

    def next_size(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def of(self, size: int, traits: Traits = PLAIN, kind: Kind = Kind.PLAIN) -> Recording[Graph]:
        return self._of.setdefault((size, traits, kind), Recording())

    def serve(
        self, rows: int, traits: Traits = PLAIN, kind: Kind = Kind.PLAIN, may_record: bool = True
    ) -> tuple[int, Recording[Graph]]:
        """The size at which a step of so many rows is run, and what there is for it."""
        place = bisect_left(self.sizes, rows)
        own = self.sizes[place]
        recording = self.of(own, traits, kind)
        if recording.graph is None and (recording.lent < PATIENCE or recording.refused or not may_record):
            near = [size for size in self.sizes[place + 1 :] if size <= self.stretch * own]
            known = [(size, one) for size in near if (one := self._of.get((size, traits, kind))) is not None]
            recorded = [pair for pair in known if pair[1].graph is not None]
            tried = [pair for pair in known if pair[1].uses > 0 and not pair[1].refused]  # it is recorded now
            for size, larger in (recorded or tried)[:1]:
                recording.lent += 1
                return size, larger
        return own, recording


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


class Drafter(Protocol):
    kind: str  # equal for those that launch the same kernels

    def draft(
        self,
        hidden: torch.Tensor,  # [n, hidden]
        tokens: torch.Tensor,  # [n]: what was sampled from it
        rows: torch.Tensor,  # [n]: whose it is; the scratch row where it does not count
        positions: torch.Tensor,  # [n]: where the tokens stand
        traits: Traits,
    ) -> None:
        """Leave in `DeviceState.drafts` how the rows may go on."""
        ...


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
        if step.in_float32 or not only_decodes(step) or step.num_tokens > largest:
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
        traits, kind = self._traits, Kind.PLAIN if step.shared is None else Kind.SHARED
        if is_speculative(step):
            kind = chains_for(step)
            if not self.fits(self.recordings.next_size(len(step.rows)), kind):
                kind = Kind.DRAFTS
        tokens = kind.width * len(step.rows) if kind in WIDTHS else step.num_tokens
        bucket, recording = self.recordings.serve(tokens // kind.width, traits, kind)
        self._send(step, bucket, kind)
        recording.uses += 1
        if self.recordings.is_due(recording):
            self._record(recording, bucket, traits, kind)
        if recording.graph is None or recording.sampled is None:
            self.plain_runs += 1
            return self._decode(bucket, traits, kind).first(tokens, kind.width)
        self.replays += 1
        recording.graph.replay()
        return recording.sampled.first(tokens, kind.width)

    def fits(self, bucket: int, kind: Kind) -> bool:
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
        if is_speculative(step):
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
            self._state.block_tables.view(-1).scatter_(0, at, value.int())

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
        if kind is Kind.DRAFTS or kind in WIDTHS:
            return self._verify(bucket * kind.width, traits, kind.width)
        rows, starts = self._inputs[: 2 * bucket].chunk(2)
        shared = self._inputs[2 * bucket : 4 * bucket].int().chunk(2) if kind is Kind.SHARED else (None, None)
        ops, tables = self._decoder.ops, self._state.decode_tables
        inputs = ops.decode_inputs(tables, rows, starts)
        sampled = self._sample(inputs, rows, traits, *shared)[1]
        ops.keep_sampled(tables, rows, inputs, sampled.tokens)
        return sampled

    def _verify(self, bucket: int, traits: Traits, width: int) -> Sampled:  # [bucket]
        """Drafts are tokens like any others: every one is a row of its own to all but attention."""
        columns = self._inputs[: (COLUMNS + 1) * bucket].view(COLUMNS + 1, bucket)
        rows, starts, numbers, mask_rows = columns[0], columns[1], columns[2], columns[COLUMNS]
        proposed = self._inputs[(COLUMNS + 1) * bucket :][: PROPOSED * bucket]
        ops, tables = self._decoder.ops, self._state.decode_tables
        inputs = ops.decode_inputs(tables, rows, starts, (columns[2:COLUMNS], proposed))
        hidden, sampled = self._sample(inputs, rows, traits, mask_rows=mask_rows, queries=width)
        said = sampled.tokens.clamp_min(0) if self.drafter is not None else None
        last = ops.keep_sampled(tables, rows, inputs, sampled.tokens, numbers, REJECTED)
        sampled.mark_rejected()
        if self.drafter is not None and said is not None and last is not None:
            self.drafter.draft(hidden, said, last, inputs.positions + 1, traits)
        return sampled

    def _sample(
        self,
        inputs: DecodeInputs,  # [bucket]
        rows: torch.Tensor,
        traits: Traits,
        members: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        mask_rows: torch.Tensor | None = None,
        queries: int = 1,
    ) -> tuple[torch.Tensor, Sampled]:  # [bucket, hidden], [bucket]
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
        )
        batch = TokenBatch(ids=inputs.ids, positions=inputs.positions, slots=inputs.slots, attention=attention)
        hidden = self._decoder.forward(batch, state.kv)
        logits = self._decoder.logits(hidden, wide=False)
        return hidden, self._sampler.sample(logits, rows, inputs.positions + 1, traits, mask_rows)
