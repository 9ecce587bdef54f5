"""Heads for tiny models, and drafts that are verified whatever they cost: what tests of speculation share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill import LLM
from tokenmill.engine.speculation import choose
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.model.draft_head import DraftHead, Target, default_kv_layer
from tokenmill.sampling import grammar
from tokenmill.step_time import FittedStepTime


def make_drafts_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which drafts are verified must not depend on how busy the machine is."""
    monkeypatch.setattr(FittedStepTime, "learn", lambda *_: None)
    monkeypatch.setattr(Payoff, "on", lambda *_: True)
    monkeypatch.setitem(choose.PER_TOKEN, "cpu", 0.0)
    monkeypatch.setattr(grammar, "SLOW", 1e9)


def made_head(model: str, path: Path, options: dict[str, Any], vocab: int = 40, **changes: Any) -> Path:
    """A head that drafts at random, which is now and then what the model says, from all that the model has cached."""
    with LLM(model, **options) as llm:
        spec, norm = llm._built.spec, llm._built.engine.runner.decoder.weights.final_norm  # type: ignore[attr-defined]
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * 0.2

    width, inner = spec.hidden, 32
    head = DraftHead(
        torch.ones(width), draw(width, width), torch.ones(2 * width), draw(2 * inner, 2 * width), draw(width, inner),
        torch.ones(width), draw(2 * inner, width), draw(width, inner), torch.ones(width), draw(vocab, width),
        torch.arange(2, 2 + vocab).int(), Target.of(spec, norm), **changes,
    )  # fmt: skip
    queries = spec.heads * spec.head_dim
    attention = {
        "attention_norm": torch.ones(width), "q_weight": draw(queries, width), "o_weight": draw(width, queries),
    }  # fmt: skip
    replace(head, kv_layer=default_kv_layer(spec), **attention).save(path)
    return path


def drafted(llm: LLM) -> int:
    """Drafts that were verified."""
    speculation = llm._built.engine.speculation
    assert speculation is not None
    return sum(one.drafted for one in speculation.stats.values())
