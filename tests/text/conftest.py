"""Fixtures for tests about text: the default model's tokenizer and a SentencePiece one with byte fallback."""

from pathlib import Path

import numpy as np
import pytest
from gguf_metadata import DATA, from_metadata

from tokenmill.errors import ModelError
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights import source
from tokenmill.model.weights.gguf import GGUFCheckpoint


@pytest.fixture(scope="session")
def default_path() -> Path:
    try:
        return source.resolve("default").path
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")


@pytest.fixture(scope="session")
def byte_level(default_path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFCheckpoint(default_path))


@pytest.fixture(scope="session")
def trained_pieces(tmp_path_factory):
    """A SentencePiece model of the Llama 2 kind: BPE, byte fallback, nothing normalized away."""
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = Path(__file__).resolve().parents[2] / "README.md"
    text = DATA / "tinyshakespeare.txt"
    lines = (text if text.is_file() else corpus).read_text(encoding="utf-8").splitlines()[:4000]
    prefix = tmp_path_factory.mktemp("pieces") / "model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


@pytest.fixture(scope="session")
def sentencepiece_metadata(trained_pieces) -> dict:
    """The metadata that a GGUF file of that model carries."""
    model, ids = trained_pieces, range(trained_pieces.vocab_size())
    kinds = [2 if model.is_unknown(id) else 3 if model.is_control(id) else 6 if model.is_byte(id) else 1 for id in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": np.array([model.get_score(id) for id in ids], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.fixture(scope="session")
def byte_fallback(sentencepiece_metadata) -> Tokenizer:
    return from_metadata(sentencepiece_metadata)
