"""DecodeGraphs: steps in which every row decodes one token, recorded once per batch size and replayed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.step import Step
from tokenmill.model.decoder import Decoder, TokenBatch
from tokenmill.ops.types import AttentionBatch
from tokenmill.sampling.sampler import Sampler


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes that are recorded; a step is padded to the next one. Finer where a row more costs relatively more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass
class _Recording:
    uses: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    tokens: torch.Tensor | None = None  # [bucket]: where a replay leaves the sampled tokens


class DecodeGraphs:
    """Input preparation, forward pass, sampling and the write to the token table in one replay.

    The host sends rows, positions and new block table entries in one copy. A size is run plainly the first time
    (kernels compile, libraries set up) and recorded the second time, so that sizes that never return cost nothing.
    """

    def __init__(self, decoder: Decoder, state: DeviceState, sampler: Sampler, max_rows: int) -> None:
        self._decoder, self._state, self._sampler = decoder, state, sampler
        self._sizes = bucket_sizes(max_rows)
        self._recordings: dict[tuple[int, int], _Recording] = {}
        device = state.tokens.device
        # [rows | starts | block_at | block_value], each section as long as the bucket
        self._inputs = torch.zeros(4 * max_rows, dtype=torch.int64, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @staticmethod
    def takes(step: Step) -> bool:
        """Whether every row of the step decodes exactly one token and nothing else happens."""
        return step.num_singles == len(step.rows) and not (
            step.admissions or step.copies or step.chosen or step.drafts or step.prompt_logprobs or 0 in step.samples
        )

    def run(self, step: Step, traits: int) -> torch.Tensor:  # [rows] int64, overwritten by the next run
        """Launch the step; `traits` says how its rows are sampled."""
        bucket = self._sizes[bisect_left(self._sizes, len(step.rows))]
        self._send(step, bucket)
        recording = self._recordings.setdefault((bucket, traits), _Recording())
        recording.uses += 1
        if recording.uses == 1:
            return self._decode(bucket, traits)[: len(step.rows)]
        if recording.graph is None:
            self._record(recording, bucket, traits)
        assert recording.graph is not None and recording.tokens is not None
        recording.graph.replay()
        return recording.tokens[: len(step.rows)]

    def _send(self, step: Step, bucket: int) -> None:
        """One copy to the device; padding rows point at the scratch row and have no context."""
        count = len(step.rows)
        words = np.zeros(2 * bucket, dtype=np.int64)
        words[:count] = step.rows
        words[count:bucket] = self._state.scratch_row
        words[bucket : bucket + count] = step.starts
        at = [row * self._state.max_blocks + first + n for row, first, new in step.blocks for n in range(len(new))]
        if at:
            values = [block for _, _, new in step.blocks for block in new]
            words = np.concatenate([words, np.array(at + values, dtype=np.int64)])
        packed = torch.from_numpy(words).pin_memory()
        inputs = self._inputs[: len(words)]
        inputs.copy_(packed, non_blocking=True)
        if at:
            block_at, block_value = inputs[2 * bucket :].chunk(2)
            self._state.block_tables.view(-1).scatter_(0, block_at, block_value.int())

    def _record(self, recording: _Recording, bucket: int, traits: int) -> None:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                recording.tokens = self._decode(bucket, traits)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        recording.graph = graph

    def _decode(self, bucket: int, traits: int) -> torch.Tensor:  # [bucket]
        """The whole step in terms of the static inputs."""
        state = self._state
        rows, starts = self._inputs[: 2 * bucket].chunk(2)
        live = rows != state.scratch_row
        attention = AttentionBatch(
            rows=rows.int(),
            q_start=torch.arange(bucket + 1, dtype=torch.int32, device=rows.device),
            context=torch.where(live, starts + 1, 0).int(),
            block_tables=state.block_tables,
            num_singles=bucket,
            max_query=1,
            max_context=state.max_len,  # a recording must serve any context, so work is cut for the longest
            host_rows=[0] * bucket,
            host_counts=[1] * bucket,
            host_context=[state.max_len] * bucket,
        )
        batch = TokenBatch(
            ids=state.tokens[rows, starts],
            positions=starts,
            slots=torch.where(live, state.slots(rows, starts), -1),
            attention=attention,
        )
        logits = self._decoder.logits(self._decoder.forward(batch, state.kv))
        tokens = self._sampler.sample_plain(logits, rows, starts + 1, traits)
        state.tokens[rows, starts + 1] = tokens.clamp_min(0).int()
        return tokens
