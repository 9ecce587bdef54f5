"""Answers: what a rank found in a step, as tensors for the rank that answers for the group."""

from __future__ import annotations

import json
from typing import Any

import torch

from tokenmill.engine.step import Step, StepResult
from tokenmill.parallel.communicator import Communicator
from tokenmill.sampling.records import TokenLogprobs

_NONE = -2  # where a draft did not hold; -1 is a token that could not be chosen


def tell_answer(ranks: Communicator, to: int, step: Step, result: StepResult) -> None:
    """One number for each sampled token, and before them how many bytes of everything else follow."""
    more = _more_of(result)
    words = [len(more)]
    for held, samples in zip(result.tokens, step.samples, strict=True):
        words += held + [_NONE] * (samples - len(held))
    ranks.send(torch.tensor(words), to)
    if more:
        ranks.send(torch.frombuffer(bytearray(more), dtype=torch.uint8), to)


def hear_answer(ranks: Communicator, source: int, step: Step) -> StepResult:
    like = torch.empty(1 + sum(step.samples), dtype=torch.int64)
    size, *tokens = ranks.receive(like, source).tolist()
    result, at = StepResult(tokens=[]), 0
    for samples in step.samples:
        result.tokens.append([token for token in tokens[at : at + samples] if token != _NONE])
        at += samples
    if size:
        more = ranks.receive(torch.empty(size, dtype=torch.uint8), source)
        _take_more(result, bytes(more.numpy()))
    return result


def _more_of(result: StepResult) -> bytes:
    """What is not tokens; seldom anything."""
    if not (result.logprobs or result.prompt_logprobs or result.pooled):
        return b""
    parts = {"logprobs": result.logprobs, "prompt_logprobs": result.prompt_logprobs, "pooled": result.pooled}
    return json.dumps(parts).encode()


def _take_more(result: StepResult, text: bytes) -> None:
    parts = json.loads(text)
    for name in ("logprobs", "prompt_logprobs"):
        found = {int(index): [_logprobs_of(one) for one in ones] for index, ones in parts[name].items()}
        setattr(result, name, found)
    result.pooled = {int(index): vector for index, vector in parts["pooled"].items()}


def _logprobs_of(parts: list[Any]) -> TokenLogprobs:
    token, logprob, rank, top = parts
    return TokenLogprobs(token, logprob, rank, [(other, value) for other, value in top])
