"""RequestState: one user request on its way, from the tokens the engine commits to the text the user sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmill.engine.request import Finish, Request
from tokenmill.engine.scheduler import Delta
from tokenmill.model.detokenizer import IncrementalDetokenizer, StopStrings
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import MODEL_LENGTH, CompletionOutput, LogprobTable, LogprobTables, RequestOutput, logprob_table
from tokenmill.params import SamplingParams


class RequestState:
    """One user request on its way: its sequences, and their text so far."""

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        requests: list[Request],
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        timeout: float | None,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.timeout = timeout
        self.leader, self.id = requests[0], requests[0].id
        self.tokenizer = tokenizer if params.detokenize else None
        self.eos_ids = eos_ids
        self.sequences = [SequenceState(self, request, params) for request in requests]
        self._prompt_tables: list[LogprobTable] = []

    @property
    def finished(self) -> bool:
        if len(self.sequences) == 1:  # asked several times per token: a generator would show
            return self.sequences[0].finish is not None
        return all(sequence.finish is not None for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The request as far as it has come."""
        error = next((s.request.error for s in self.sequences if s.request.error), None)
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=self._beam_outputs() if self.leader.beams is not None else self._outputs(),
            finished=self.finished,
            metrics=self.leader.metrics,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self._prompt_logprobs(),
            error=error,
        )

    def _outputs(self) -> list[CompletionOutput]:
        outputs = [sequence.output(index) for index, sequence in enumerate(self.sequences)]
        if self.params.best_of is None or self.params.best_of == self.params.n:
            return outputs
        if not self.finished:
            return outputs[: self.params.n]
        best = sorted(outputs, key=_badness)[: self.params.n]
        for index, output in enumerate(best):
            output.index = index
            output.logprobs = output.logprobs if self.params.logprobs is not None else None
        return best

    def _beam_outputs(self) -> list[CompletionOutput]:
        assert self.leader.beams is not None
        finish = self.sequences[0].finish
        if finish is None or finish in (Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR):
            return [CompletionOutput(0, "", [], finish_reason=finish and str(finish))]
        return [
            CompletionOutput(
                index=index,
                text=self.tokenizer.decode(beam.tokens, self.params.skip_special_tokens) if self.tokenizer else "",
                token_ids=beam.tokens,
                cumulative_logprob=beam.cumulative_logprob,
                finish_reason=str(Finish.STOP if beam.finished_by_stop else Finish.LENGTH),
            )
            for index, beam in enumerate(self.leader.beams.group.results()[: self.params.n])
        ]

    def _prompt_logprobs(self) -> list[LogprobTable | None]:
        known = self.leader.prompt_logprobs
        if len(self._prompt_tables) != len(known):  # built once: a stream of outputs would pay for it each time
            decode = _decoder_of(self.tokenizer)
            self._prompt_tables = [logprob_table(one, decode) for one in known]
        return [*[None] * self.leader.scored_from, *self._prompt_tables]


class SequenceState:
    """One sequence's tokens and text so far."""

    def __init__(self, state: RequestState, request: Request, params: SamplingParams) -> None:
        self.request_state = state
        self.request = request
        self.finish: Finish | None = None
        self.text = ""
        self.num_tokens = 0  # taken in; a stop string may end the sequence before the engine does
        self._tokenizer = state.tokenizer
        # As many as tokens taken in.
        self.logprobs = None if params.logprobs is None else LogprobTables(_decoder_of(state.tokenizer))
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)

    def take_in(self, delta: Delta) -> bool:
        """Returns whether a stop string ended the sequence."""
        if self._tokenizer is None or self.request.beams is not None:
            self.num_tokens += len(delta.tokens)
        else:
            self._decode(delta.tokens)
        if self.logprobs is not None:
            taken = self.num_tokens - len(self.logprobs)
            self.logprobs.extend(delta.logprobs[:taken])
        if self._stops.match is not None:
            self.finish = Finish.STOP
            return not delta.finished
        if delta.finished:
            self.finish = self.request.finish
            if self._detokenizer is not None:
                self.text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return False

    def output(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.tokens_from(0),
            cumulative_logprob=self.request.cumulative_logprob if self.request.logprobs else None,
            logprobs=None if self.logprobs is None else self.logprobs.view(),
            finish_reason=None if self.finish is None else str(self.finish),
            stop_reason=self.stop_reason,
        )

    def tokens_from(self, first: int) -> list[int]:
        """The tokens taken in, without the first ones."""
        start = self.request.prompt_len
        return self.request.tokens[start + first : start + self.num_tokens]

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the id of the stop token; None where an end token or the end of a grammar did it. An
        answer that is shorter than `max_tokens` because the model's length is reached says so.
        """
        if self._stops.match is not None:
            return self._stops.match
        if self.finish is Finish.LENGTH and (self.request.params.max_tokens or 0) > self.request.max_tokens:
            return MODEL_LENGTH
        if self.finish is not Finish.STOP or not self.num_tokens:
            return None
        [last] = self.tokens_from(self.num_tokens - 1)
        return last if last in self.request.stop_ids and last not in self.request_state.eos_ids else None

    def _decode(self, tokens: list[int]) -> None:
        if self._detokenizer is None:
            assert self._tokenizer is not None
            prompt = self.request.tokens[: self.request.prompt_len]
            skip = self.request.params.skip_special_tokens
            self._detokenizer = IncrementalDetokenizer(self._tokenizer, prompt, skip)
        for token in tokens:
            self.num_tokens += 1
            text = self._detokenizer.push([token])
            # No part of a stop string may lie in the first min_tokens tokens.
            self.text += text if self.num_tokens <= self.request.params.min_tokens else self._stops.push(text)
            if self._stops.match is not None:
                return


def _badness(output: CompletionOutput) -> tuple[bool, float]:
    """Orders the sequences of best_of: those that were cut off last, then by mean log-probability."""
    whole = output.finish_reason in (Finish.STOP, Finish.LENGTH) and bool(output.token_ids)
    return not whole, -(output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))


def _decoder_of(tokenizer: Tokenizer | None) -> Callable[[int], str] | None:
    """The text of one token, special ones included."""
    return None if tokenizer is None else lambda token: tokenizer.decode((token,), False)
