"""The answer a request must get, as a pure function of the request: no engine, no batch, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tokenmill.engine.request import Finish, Request
from tokenmill.engine.runner.simulated import ROOT, beam_candidates, mix, ranked_tokens
from tokenmill.sampling.beam import BeamGroup

VOCAB = 1000


@dataclass(frozen=True)
class Answer:
    """What the request says when nothing disturbs it."""

    sequences: tuple[tuple[int, ...], ...]  # one, or for a beam search the returned ones, best first
    finish: Finish
    poisoned: bool = False  # it breaks every step that computes one of its tokens; sequences[0] ends with that token

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.sequences[0]


def solo_answer(request: Request, poison: frozenset[int] = frozenset()) -> Answer:
    if not poison.isdisjoint(request.tokens[: request.prompt_len]):
        return Answer(((),), Finish.ERROR, poisoned=True)
    prompt = tuple(request.tokens[: request.prompt_len])
    if request.pooling is not None:
        return Answer(((),), Finish.STOP)
    if request.beams is not None:
        return _beam_answer(request, prompt, poison)
    return _plain_answer(request, prompt, poison)


def _plain_answer(request: Request, prompt: tuple[int, ...], poison: frozenset[int]) -> Answer:
    params, output = request.params, []
    value = _prompt_hash(prompt)
    seed = 0 if params.greedy else request.seed
    while True:
        forbidden = sorted(request.stop_ids) if len(output) < params.min_tokens else []
        token = ranked_tokens(value, seed, 1, VOCAB, forbidden)[0]
        output.append(token)
        if token in request.stop_ids:
            return Answer((tuple(output),), Finish.STOP)
        if len(output) == request.max_tokens:
            return Answer((tuple(output),), Finish.LENGTH)
        if token in poison:
            return Answer((tuple(output),), Finish.ERROR, poisoned=True)
        value = mix(value, token)


def _beam_answer(request: Request, prompt: tuple[int, ...], poison: frozenset[int]) -> Answer:
    params = request.params
    group = BeamGroup(
        width=params.beam_width,
        num_return=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        stop_ids=request.stop_ids,
        max_new_tokens=request.max_tokens,
    )
    values = [_prompt_hash(prompt)]
    width = 2 * params.beam_width + len(request.stop_ids)
    while True:
        chosen = group.advance([beam_candidates(value, width, VOCAB) for value in values])
        if not chosen:
            break
        if any(token in poison for _, token in chosen):
            return Answer(((),), Finish.ERROR, poisoned=True)
        values = [mix(values[parent], token) for parent, token in chosen]
    found = group.results()
    finish = Finish.STOP if found[0].finished_by_stop else Finish.LENGTH
    return Answer(tuple(tuple(one.tokens) for one in found), finish)


def pooled_answer(request: Request) -> list[float]:
    """The vector that it must get: how many tokens were pooled, and their sum."""
    read = request.tokens if request.pooling == "mean" else request.tokens[-1:]
    return [float(len(read)), float(sum(read))] if request.pooling is not None else []


@lru_cache(maxsize=4096)
def _prompt_hash(prompt: tuple[int, ...]) -> int:
    value = ROOT
    for token in prompt:
        value = mix(value, token)
    return value
