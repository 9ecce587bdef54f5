"""Masks of structured output on the GPU: in recorded steps and plain ones, beside rows that have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Finish, Request
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.sampling import grammar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

LENGTH, EVERY = 40, 97  # tokens of an answer; the n-th token of one must be n modulo 97
FORCED = range(10, 30)  # and among these just n


class Matcher:
    """Stands in for llguidance, which need not be installed where there is a GPU."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.said: list[int] = []

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.arange(self.vocab) % (self.vocab if len(self.said) in FORCED else EVERY) == len(self.said)

    def compute_bitmask(self) -> bytes:
        return np.packbits(self.allowed(), bitorder="little").tobytes() + bytes(4)

    def consume_token(self, token: int) -> bool:
        fits = bool(self.allowed()[token])
        self.said.append(token)
        return fits

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def compute_ff_tokens(self) -> list[int]:
        return [token for token in FORCED if token >= len(self.said)] if len(self.said) in FORCED else []

    def deep_copy(self) -> Matcher:
        copied = Matcher(self.vocab)
        copied.said = list(self.said)
        return copied

    def is_stopped(self) -> bool:
        return len(self.said) == LENGTH

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, structured: bool) -> tuple[list[Request], list[Request]]:
    vocab = llm._processor.vocab_size
    monkeypatch.setattr(grammar, "grammar_text", lambda form: form["regex"])
    monkeypatch.setattr(grammar.Grammars, "_matcher", lambda self, text: Matcher(vocab))
    engine = llm._processor.engine
    assert isinstance(engine, Engine)
    form = SamplingParams(structured={"regex": "x"}, temperature=0.9, max_tokens=60)
    plain = SamplingParams(temperature=0.9, max_tokens=200, ignore_eos=True)
    bound = [Request(f"bound {k}", [5 + k] * 9, form, max_tokens=60, seed=k) for k in range(5 * structured)]
    free = [Request(f"free {k}", [50 + k] * 9, plain, max_tokens=200, seed=k) for k in range(6)]
    for request in [*bound, *free]:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    return bound, free


@pytest.mark.parametrize("graphs", [False, True])
def test_only_allowed_tokens_are_sampled_and_neighbours_do_not_notice(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    monkeypatch.setattr(Payoff, "on", lambda *_: True)
    options = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "cuda_graphs": graphs}
    with LLM(checkpoint, **options, speculation="suffix" if graphs else None) as llm:
        _, alone = run(llm, monkeypatch, structured=False)
        bound, beside = run(llm, monkeypatch, structured=True)
        assert [request.finish for request in bound] == [Finish.STOP] * 5
        for request in bound:
            assert [token % EVERY for token in request.output] == list(range(LENGTH))
        assert sum(a.output == b.output for a, b in zip(alone, beside, strict=True)) >= 5  # up to rounding of ties
        assert all(len(request.output) == 200 for request in beside)
        speculation = llm._processor.engine.speculation  # type: ignore[attr-defined]
        assert (speculation is not None) == graphs
        if speculation is not None:
            forced = speculation.stats["grammar"]
            assert forced.accepted == forced.drafted > 0
