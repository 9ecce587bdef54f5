"""Engines that the API tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_engines import open_tiny

from tokenmill import LLM


@pytest.fixture(scope="module")
def tiny(tiny_model: str) -> Iterator[LLM]:
    """Random weights, token ids only."""
    with open_tiny(tiny_model) as llm:
        yield llm


@pytest.fixture(scope="session")
def text_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a tokenizer of single letters: any word is several tokens long."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "text"
    folder.mkdir()
    letters = ["Ġ", *map(chr, range(33, 127))]  # the space, as byte-level tokenizers write it, and ASCII
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<s>", "</s>", *letters])}
    config = json.loads((Path(tiny_model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(vocabulary)}))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


@pytest.fixture(scope="module")
def texter(text_model: str) -> Iterator[LLM]:
    """Random weights that speak in letters."""
    with open_tiny(text_model, skip_tokenizer_init=False) as llm:
        yield llm
