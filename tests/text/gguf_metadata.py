"""Tokenizers made from metadata alone, and where the test texts lie."""

from pathlib import Path
from types import SimpleNamespace

from tokenmill.model.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def from_metadata(metadata: dict) -> Tokenizer:
    config = {"bos_token_id": 1, "eos_token_id": [2]}
    return Tokenizer.from_gguf(SimpleNamespace(metadata=metadata, config=config, path="test.gguf"))
