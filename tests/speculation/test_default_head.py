"""The default model has a draft head of its own: it comes with the package, is used unasked, and drafts well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY

from tokenmill import LLM, SamplingParams
from tokenmill.engine.speculation import choose
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.engine.speculation.speculation import SHORT
from tokenmill.model import draft_head
from tokenmill.model.draft_head import SHIPPED, shipped_head
from tokenmill.model.families import spec_from_config
from tokenmill.ops.native.library import Library, load
from tokenmill.step_time import FittedStepTime

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
SMOLLM = {
    "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152, "num_attention_heads": 9, "head_dim": 64,
    "num_key_value_heads": 3,
}  # fmt: skip
CHATS = [
    [{"role": "user", "content": text}]
    for text in ("What is the capital of France, and why?", "Write a short story about a dog.", "Explain gravity.")
]


def with_head(llm: LLM) -> None:
    """Have the head made that comes after a while."""
    speculation = llm._built.engine.speculation
    if speculation is None:
        return
    llm.generate(["A mill"], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    assert not speculation.later
    for future in speculation.coming:
        future.result(timeout=600)


def test_a_short_answer_has_no_head_loaded(default_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payoff, "on", lambda *_: True)
    with LLM(default_model, device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        speculation = llm._built.engine.speculation
        assert speculation is not None
        llm.generate(["A mill"], SamplingParams(temperature=0.0, max_tokens=SHORT, ignore_eos=True), use_tqdm=False)
        assert speculation.later and not speculation.coming
        with_head(llm)
        llm.generate(["A mill"], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
        assert [one.name for one in speculation.proposers] == ["grammar", "suffix", "head"] and not speculation.coming


def test_it_is_used_unasked_saves_steps_and_changes_nothing(
    default_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Payoff, "on", lambda *_: True)  # whatever runs beside the tests
    monkeypatch.setattr(FittedStepTime, "learn", lambda *_: None)
    monkeypatch.setitem(choose.PER_TOKEN, "cpu", 0.1)
    for params in (
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=1.0, seed=3, max_tokens=60),
        SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=60, repetition_penalty=1.1),
    ):
        answers, steps = [], []
        for setting in (None, "off"):
            with LLM(default_model, device="cpu", speculation=setting, max_num_seqs=4, max_model_len=512) as llm:
                engine = llm._built.engine
                with_head(llm)
                before = engine.scheduler.stats.steps
                answers.append([one.outputs[0].token_ids for one in llm.chat(CHATS, params, use_tqdm=False)])
                steps.append(engine.scheduler.stats.steps - before)
                if engine.speculation is not None:
                    head = engine.speculation.stats["head"]
                    assert head.drafted > 30 and head.accepted > 0.25 * head.drafted
        assert answers[0] == answers[1]
        assert steps[1] > 1.1 * steps[0]  # the slowest of three


def test_unasked_it_leaves_larger_batches_alone(default_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payoff, "on", lambda *_: True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(default_model, device="cpu", max_num_seqs=8, max_model_len=256) as llm:
        llm.chat([CHATS[0]] * (choose.UNASKED_ROWS + 1), params, use_tqdm=False)
        speculation = llm._built.engine.speculation
        assert speculation is not None and not any(one.drafted for one in speculation.stats.values())


def test_switched_on_it_drafts_for_larger_batches(default_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payoff, "on", lambda *_: True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(default_model, device="cpu", max_num_seqs=8, max_model_len=256, speculation="on") as llm:
        llm.chat([CHATS[0]] * (choose.UNASKED_ROWS + 1), params, use_tqdm=False)
        speculation = llm._built.engine.speculation
        assert speculation is not None and [one.name for one in speculation.proposers] == ["grammar", "suffix", "head"]
        assert any(one.drafted for one in speculation.stats.values())


def test_a_file_that_was_changed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, spec = torch.ones(576), spec_from_config(TINY | SMOLLM)
    assert shipped_head(spec, norm) is None  # another model
    [(fingerprint, (name, digest))] = SHIPPED.items()
    monkeypatch.setattr(draft_head, "fingerprint", lambda _: fingerprint)
    found = shipped_head(spec, norm)
    assert found is not None and len(found.ids) == 8192
    made = found.recipe  # what it takes to make it again, and what it was worth
    assert made["schedule"]["seed"] == 0 and made["tokens"] > 5_000_000 and made["training"]["steps"] > 5000
    assert made["acceptance"]["greedy"]["per_step"] > 2.2 and made["acceptance"]["coupled"]["per_step"] > 1.8
    assert (Path(draft_head.__file__).parent / "heads" / name).stat().st_size < 12 << 20
    monkeypatch.setitem(SHIPPED, fingerprint, (name, digest[::-1]))
    assert shipped_head(spec, norm) is None


@pytest.mark.parametrize("setting", [None, "on"])
def test_an_answer_goes_on_without_a_head_whose_file_was_changed(
    setting: str | None, default_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [(fingerprint, (name, digest))] = SHIPPED.items()
    monkeypatch.setitem(SHIPPED, fingerprint, (name, digest[::-1]))
    with LLM(default_model, device="cpu", max_num_seqs=4, max_model_len=256, speculation=setting) as llm:
        speculation = llm._built.engine.speculation
        assert speculation is not None
        params = SamplingParams(temperature=0.0, max_tokens=2 * SHORT, ignore_eos=True)
        llm.generate(["A mill"], params, use_tqdm=False)
        for future in speculation.coming:
            assert future.exception(timeout=600) is not None
        assert len(llm.generate(["A mill"], params, use_tqdm=False)[0].outputs[0].token_ids) == 2 * SHORT
        assert [one.name for one in speculation.proposers] == ["grammar", "suffix"] and not speculation.coming
    assert "is not the file that tokenmill came with" in caplog.text


def test_a_relative_of_the_model_starts_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    [fingerprint] = SHIPPED
    monkeypatch.setattr(draft_head, "fingerprint", lambda _: fingerprint)
    for change in ({"vocab_size": 49153}, {"num_hidden_layers": 29}):
        assert shipped_head(spec_from_config(TINY | SMOLLM | change), torch.ones(576)) is None
