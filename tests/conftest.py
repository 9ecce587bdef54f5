"""Fixtures that more than one test room uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny(folder: Path, **changes: Any) -> str:
    """A config.json for a model of a few kilobytes with random weights; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return str(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def default_model() -> str:
    """The path of the default model, or a skip where it can neither be found nor fetched."""
    from tokenmill.errors import ModelError
    from tokenmill.model.weights.source import resolve

    try:
        return str(resolve("default").path)
    except ModelError as error:
        pytest.skip(f"the default model is not to be had here: {error}")
