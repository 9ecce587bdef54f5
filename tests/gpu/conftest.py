"""The checkpoint that the GPU tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpu") / "llama"
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=4096, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
