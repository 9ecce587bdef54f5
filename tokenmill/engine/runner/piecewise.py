"""PieceGraphs: steps that read prompts, replayed in recorded pieces; attention is launched between them."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.engine.runner.paths import PlainForward, PreparedStep
from tokenmill.engine.runner.recordings import Recording, Recordings
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.step import Step, is_speculative
from tokenmill.model.decoder import Attend, Attended, Decoder, TokenBatch
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.types import AttentionBatch
from tokenmill.plan.solve.memory import RECORDED_PIECES, RECORDED_TOKENS

# What the host takes to launch a layer plainly, and what the products of a large GPU reach: together they say from how
# many tokens on the device is busy for longer than that, so that only the padding of a recording would be left of it.
LAYER_LAUNCH_S = 0.3e-3
FLOPS = 7e14
STRETCH = 1.5  # as that of decode steps, but tokens are sooner enough for their products to take time


def token_sizes(most: int) -> list[int]:
    """Numbers of tokens that are recorded; a step is padded to the next one.

    Where products change to another kernel (behind 1, 4, 8, 32, 64, 128, 192 and 384 tokens) there is a size, so that
    padding leads to no kernel for more tokens than there are, but where a larger recording serves. 448 is left out: the
    library's products of llama3-8b take longer with so many rows than with 512 (14.3 and 11.0 ms on an H200,
    scripts/gpu_prompts.py).
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 193, 32), 256, 320, 384, *range(512, 1025, 128)]
    return [size for size in sizes if size <= most]


def tokens_worth_recording(spec: DecoderSpec, max_tokens: int) -> int:
    """The largest step that gains; max_tokens is the largest there is."""
    token_s = 2.0 * spec.active_parameters / FLOPS
    return min(int(LAYER_LAUNCH_S * spec.num_layers / token_s), RECORDED_TOKENS, max_tokens)


class Graph(Protocol):
    """One recorded piece."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Makes recordings of pieces: see `Capture`."""

    def recording(self) -> AbstractContextManager[None]: ...

    def begin(self) -> None: ...

    def end(self) -> Graph: ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def renew(self) -> None: ...


@dataclass(frozen=True)
class Pieces:
    """A step of one size up to its last attention: each piece ends with the queries of its layer."""

    graphs: list[Graph]
    queries: list[torch.Tensor]  # of [size, heads, dim]: where the pieces leave them
    residual: torch.Tensor  # [size, hidden]: where the last piece leaves it


Served = tuple[int, Recording[Pieces]]  # the size at which a step is run, and what there is for it


class PieceGraphs(PlainForward):
    """What `Decoder.begin` computes for a step's tokens, with a launch per layer besides those of its attention.

    Attention's grid follows from the mix of rows, so it is launched plainly, with the step's own batch; the rest of a
    step depends on nothing but the number of its tokens. Padding tokens belong to the scratch row: their keys and
    values are not written, nobody attends to them, and no op adds up over tokens (scales of inputs are per token, or
    constants). A mixture routes them all to the experts of one token.

    A size is run plainly the first time and recorded the second time; a larger recording serves in between
    (`Recordings`).
    """

    def __init__(self, decoder: Decoder, state: DeviceState, most_tokens: int, recorder: Recorder) -> None:
        super().__init__(decoder, state)
        self._decoder, self._state, self._recorder = decoder, state, recorder
        self.resting = False  # takes nothing for now
        self._served: Served
        self.recordings = Recordings[Pieces](token_sizes(most_tokens), STRETCH)
        self._pieces = 0  # recorded so far
        self.replays = self.plain_runs = 0  # steps so far
        spec, device = decoder.spec, state.tokens.device
        self._inputs = torch.zeros(2 * most_tokens, dtype=torch.int64, device=device)  # [rows | positions] of a size
        value_dim = spec.mla.kv_rank if spec.mla else spec.head_dim
        self._mixed = torch.zeros(most_tokens, spec.heads, value_dim, dtype=decoder.weights.dtype, device=device)

    def takes(self, step: Step) -> bool:
        """Unless it is too large, or its size cannot be recorded, or rows have fewer slots than positions."""
        sizes = self.recordings.sizes
        is_other = is_speculative(step) or step.adapters or step.pruned
        if self.resting or is_other or not sizes or step.num_tokens > sizes[-1]:
            return False
        full = self._pieces + self._decoder.spec.num_layers > RECORDED_PIECES
        self._served = self.recordings.serve(step.num_tokens, may_record=not full)
        recording = self._served[1]
        return not (recording.refused or (full and recording.graph is None))

    def padded(self, step: Step) -> int:
        return self._served[0]

    def hidden(self, prepared: PreparedStep) -> torch.Tensor:
        return self._decoder.end(self._begin(prepared))

    def logits(self, prepared: PreparedStep) -> torch.Tensor | None:
        wanted = None if prepared.all_wanted else prepared.entries
        hidden = self._decoder.end(self._begin(prepared), wanted=wanted)
        return self._decoder.logits(hidden) if len(prepared.entries) else hidden

    def _begin(self, prepared: PreparedStep) -> Attended:
        """As `Decoder.begin`, of the step's tokens without the padding; overwritten by the next step."""
        rows, positions, batch = prepared.rows, prepared.positions, prepared.attention
        size, recording = self._served
        tokens = sum(batch.host_counts)
        torch.cat([rows, positions], out=self._inputs[: 2 * size])
        self._mixed[tokens:size].zero_()  # what an earlier step left there may be no number
        batch.out = self._mixed[:tokens]
        recording.uses += 1
        if self.recordings.is_due(recording):
            self._record(recording, size, batch)
        pieces = recording.graph
        if pieces is None:
            self.plain_runs += 1
            residual = self._through(size, batch, lambda index, q: self._attend(index, q, batch, size))
        else:
            self.replays += 1
            for index, (graph, q) in enumerate(zip(pieces.graphs, pieces.queries, strict=True)):
                graph.replay()
                self._attend(index, q, batch, size)
            residual = pieces.residual
        last = self._decoder.spec.num_layers - 1
        return Attended(last, self._decoder.weights.layer(last), self._mixed[:tokens], residual[:tokens])

    def _attend(
        self,
        index: int,
        q: torch.Tensor,  # [size, heads, dim]
        batch: AttentionBatch,
        size: int,
    ) -> torch.Tensor:  # [size, heads, v_dim]
        """Of the step's tokens; padding gets zeros."""
        out = batch.out
        assert out is not None
        found = self._decoder.attend(index, q[: len(out)], self._state.kv[index], batch)
        if found is not out:
            out.copy_(found)
        return self._mixed[:size]

    def _record(self, recording: Recording[Pieces], size: int, batch: AttentionBatch) -> None:
        graphs: list[Graph] = []
        queries: list[torch.Tensor] = []
        last = self._decoder.spec.num_layers - 1

        def attend(index: int, q: torch.Tensor) -> torch.Tensor:
            """Nothing is computed while it is recorded, so there is nothing to attend to: one piece ends here."""
            graphs.append(self._recorder.end())
            queries.append(self._recorder.borrow(q))
            if index < last:
                self._recorder.begin()
            return self._mixed[:size]

        try:
            with self._recorder.recording():
                self._recorder.begin()
                residual = self._recorder.borrow(self._through(size, batch, attend))
            recording.graph = Pieces(graphs, queries, residual)
            self._pieces += len(graphs)
        except RuntimeError as error:  # slower, but the answers go on
            recording.refused = True
            graphs.clear()
            if self.recordings.empty:
                self._recorder.renew()
            warnings.warn(f"steps of {size} tokens cannot be recorded and are run plainly: {error}", stacklevel=2)

    def _through(self, size: int, batch: AttentionBatch, attend: Attend) -> torch.Tensor:  # [size, hidden]
        """All layers up to the last attention in terms of the static inputs; the residual."""
        state = self._state
        rows, positions = self._inputs[: 2 * size].chunk(2)
        slots = torch.where(rows != state.scratch_row, state.slots(rows, positions), -1)
        tokens = TokenBatch(state.tokens[rows, positions], positions, slots, batch, attend)
        return self._decoder.begin(tokens, state.kv).take()[1]
