"""Stages of a pipeline: runners that have some of the layers, and hand on what they made of a step's tokens.

Every stage launches every step, in order. The first embeds tokens, the last samples and tells the first what it found;
the tokens that a later step starts from come with that step (`Step.told`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tokenmill.engine.runner.answers import hear_answer, tell_answer
from tokenmill.engine.runner.inputs import pack
from tokenmill.engine.runner.paths import PreparedStep, attention_batch
from tokenmill.engine.runner.placing import place_modules
from tokenmill.engine.runner.recorded_stage import RecordedStage
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.torch_runner import TorchRunner, to_device
from tokenmill.engine.step import Loss, Pending, Step, StepResult
from tokenmill.model.decoder import Decoder
from tokenmill.parallel.communicator import Communicator
from tokenmill.quant.schemes.adapters import LowRankUpdates

_LIGHT = (
    1 << 15
)  # bytes of an answer that may be on its way whatever else is: far fewer than a ring between ranks holds
_WORDS = 32  # bytes of a log-probability or a component of a vector, as text


@dataclass(frozen=True)
class Pipe:
    """A rank's ends of the pipeline: ranks of one place in their stages are connected, and the last stage's first rank
    with rank 0.
    """

    communicator: Communicator  # of all ranks
    stages: int

    @property
    def _width(self) -> int:
        """Ranks of a stage."""
        return self.communicator.size // self.stages

    @property
    def is_asked(self) -> bool:
        """Whether this is the rank that answers for the group."""
        return self.communicator.rank == 0

    def receive(self, into: torch.Tensor) -> None:  # [tokens, hidden]
        into.copy_(self.communicator.receive(into, self.communicator.rank - self._width))

    def send(self, hidden: torch.Tensor) -> None:  # [tokens, hidden]
        self.communicator.send(hidden, self.communicator.rank + self._width)

    def tell(self, step: Step, result: StepResult) -> None:
        """The last stage says what was found."""
        if self.communicator.rank != self.communicator.size - self._width:
            return
        tell_answer(self.communicator, 0, step, result)

    def hear(self, step: Step) -> StepResult:
        """And the first hears it, step by step."""
        return hear_answer(self.communicator, self.communicator.size - self._width, step)


class StageRunner:
    """A rank of a stage that is not the last: it samples nothing, and keeps keys and values of its layers."""

    def __init__(
        self, decoder: Decoder, state: DeviceState, pipe: Pipe, *, max_rows: int, max_tokens: int, graphs: bool
    ) -> None:
        self.decoder, self.state, self.pipe = decoder, state, pipe
        self._entering: torch.Tensor | None = None
        if not decoder.spec.embeds:
            self._entering = state.enter_from_stage(max_tokens, decoder.spec.hidden, decoder.weights.dtype)
        self._sizes = max_rows, max_tokens
        self._recorded = RecordedStage(decoder, state, *self._sizes) if graphs else None
        self._adapted: RecordedStage | None = None  # of rows with adapters
        self._unheard: deque[_Passed] = deque()  # where this is the rank that answers
        self._candidates: dict[int, int] = {}  # by row: log-probabilities that each of its tokens comes with

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        packed = pack(step, self.state.tokens.shape[1], self.state.max_blocks)
        words = to_device(torch.from_numpy(packed.words), self.state.tokens.device)
        part = {name: words[where] for name, where in packed.sections.items()}
        self.state.write(part["token_at"], part["token_value"], part["block_at"], part["block_value"])
        if step.moves:
            self.state.copy_blocks(part["move_from"], part["move_to"])
        if step.placements:
            place_modules(step, self.decoder, self.state)
        if self._entering is not None:
            self.pipe.receive(self._entering[: step.num_tokens])
        prepared = PreparedStep(
            step,
            self.state,
            part["token_rows"],
            part["positions"],
            part["positions"],
            attention_batch(step, packed, part, self.state),
            part["entries"],
            all_wanted=False,
            sample_rows=[],
            adapters=part.get("adapters"),
        )
        recorded = self._adapted if step.adapters else self._recorded
        hidden = None if recorded is None else recorded.hidden(prepared.tokens)
        if hidden is None:
            hidden = self.decoder.leave(prepared.tokens, self.state.kv)
        passed = _Passed(step, self.pipe)
        if self.pipe.is_asked:
            self._hear_what_is_heavy()
            self._unheard.append(passed)
            passed.heavy = self._answer_bytes(step) > _LIGHT
        self.pipe.send(hidden)
        return passed

    def serve_adapters(self, updates: Mapping[str, LowRankUpdates]) -> None:
        """As `TorchRunner.serve_adapters`."""
        self.decoder.adapters = updates
        if self._recorded is not None:
            self._adapted = RecordedStage(self.decoder, self.state, *self._sizes, adapted=True)

    def _hear_what_is_heavy(self) -> None:
        """A rank that waits until its long answer is taken receives nothing, and this one would wait for that."""
        while self._unheard and self._unheard[0].is_heard:
            self._unheard.popleft()
        if any(one.heavy for one in self._unheard):
            while self._unheard:
                self._unheard.popleft().wait()

    def _answer_bytes(self, step: Step) -> int:
        """At most, about."""
        for one in step.admissions:
            width, beams = one.params.logprobs, one.params.beam_width
            best = max(-1 if width is None else width, 0 if beams is None else 2 * beams + len(one.stop_ids))
            self._candidates[one.row] = 2 + best if width is not None or beams is not None else 0
        words = sum(self._candidates[row] * samples for row, samples in zip(step.rows, step.samples, strict=True))
        for row, count in zip(step.rows, step.counts, strict=True):
            if row in step.prompt_logprobs:
                words += count * (2 + step.prompt_logprobs[row][0])
        words += len(step.pooling) * self.decoder.spec.hidden
        return _WORDS * words + 8 * sum(step.samples)

    def reset(self) -> Loss | None: ...

    def close(self) -> None: ...


class LastStage:
    """A rank of the last stage: it goes on with what the others made, samples, and tells what it found."""

    def __init__(self, runner: TorchRunner, pipe: Pipe) -> None:
        self.runner, self.pipe = runner, pipe
        decoder = runner.decoder
        width, dtype = decoder.spec.hidden, decoder.weights.dtype
        self._entering = runner.state.enter_from_stage(runner.max_tokens, width, dtype)

    @property
    def decoder(self) -> Decoder:
        return self.runner.decoder

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        self.pipe.receive(self._entering[: step.num_tokens])
        pending = self.runner.launch(step)
        self.pipe.tell(step, pending.wait())
        return pending

    def reset(self) -> Loss | None:
        self.runner.reset()
        return None

    def close(self) -> None:
        self.runner.close()


class _Passed:
    """A step that went on to other stages."""

    def __init__(self, step: Step, pipe: Pipe) -> None:
        self._step, self._pipe = step, pipe
        self._result: StepResult | None = None
        self.heavy = False  # its answer may be long

    @property
    def is_heard(self) -> bool:
        return self._result is not None

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self._pipe.hear(self._step) if self._pipe.is_asked else StepResult(tokens=[])
        return self._result
