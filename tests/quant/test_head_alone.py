"""A head that is the embedding can be judged on its own: nothing else of the model is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_models import CONFIG, checkpoint, text, write
from tiny import logits_of
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from tokenmill.cli.app import app
from tokenmill.model.families import spec_from_config
from tokenmill.quant.tool.evaluate import StoreBuilder
from tokenmill.quant.tool.layer_source import LayerSource, untied
from tokenmill.quant.tool.report import Candidate, measure


@pytest.fixture
def tied() -> LayerSource:
    model = checkpoint(tie_word_embeddings=True)
    return LayerSource(spec_from_config(model.config), model)


def test_a_head_of_its_own_changes_nothing(tied: LayerSource) -> None:
    apart, ids = untied(tied), text(2, 24)
    assert "lm_head" in apart.spec.parameters() and torch.equal(apart.read("lm_head"), apart.read("embed"))
    before, after = (logits_of(one.spec, StoreBuilder(one).build(), ids) for one in (tied, apart))
    assert torch.equal(before, after)
    assert untied(apart) is apart


def test_rounding_the_head_leaves_the_embedding_alone(tied: LayerSource) -> None:
    """The logits are those of the rounded matrix on the very hidden states of the model as it is."""
    apart, ids = untied(tied), text(2, 24)
    chosen = [Candidate(name, f"lm_head={name}") for name in ("int8", "int4-g32")]
    eight, four = measure(apart, chosen, ids, ids, lambda done, total, what: None)
    assert 0 < eight.quality.divergence < four.quality.divergence / 10
    assert eight.bytes > four.bytes
    store = StoreBuilder(apart).build()
    rows = store.lm_head.storage["weight"]  # [vocab, hidden]
    step = rows.abs().amax(1, keepdim=True) / 127  # of a grid of 255 values
    store.lm_head.storage["weight"].copy_((rows / step).round() * step)
    rounded = logits_of(apart.spec, store, ids)[:, :-1].log_softmax(-1)
    exact = logits_of(tied.spec, StoreBuilder(tied).build(), ids)[:, :-1].log_softmax(-1)
    divergence = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    assert eight.quality.divergence == pytest.approx(divergence, rel=0.2)  # scales are bfloat16 in the report


def test_the_report_says_that_the_head_is_measured_alone(tmp_path: Path) -> None:
    folder = write(checkpoint(tie_word_embeddings=True), tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(CONFIG["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = " ".join(f"w{n}" for n in text(1, 700)[0].tolist())
    (tmp_path / "text.txt").write_text(words)
    asked = ["quantize", str(folder), "--report", "--scheme", "lm_head=int8", "--text", str(tmp_path / "text.txt")]
    asked += ["--tokens", "256", "--samples", "2", "--length", "32", "--no-speed", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "head is its embedding" in done.stderr
    assert [line["name"] for line in json.loads(done.stdout)] == ["fp32", "lm_head=int8"]
    (tmp_path / "questions.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    refused = CliRunner().invoke(app, [*asked, "--gsm8k", str(tmp_path / "questions.jsonl")])
    assert refused.exit_code == 2 and "leave out --gsm8k" in refused.output
