"""Models of a few kilobytes with seeded random weights, for the tests of the quantizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.names import recipes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class MemoryCheckpoint:
    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def checkpoint(seed: int = 0, **changes: Any) -> MemoryCheckpoint:
    """Weights like those of trained models in one respect: some input channels are far larger than others."""
    config = CONFIG | changes
    spec = spec_from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, ways in recipes(spec).items():
        for piece in ways[0]:
            if spec.parameters()[name].kind == "norm":
                value = torch.rand(piece.shape, generator=generator).pow(3) * 4 + 0.1
            else:
                value = torch.randn(piece.shape, generator=generator) * piece.shape[-1] ** -0.5
            tensors[piece.source] = value
    tensors["model.embed_tokens.weight"] *= 8
    return MemoryCheckpoint(config, tensors)


def write(model: MemoryCheckpoint, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    save_file(model.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def text(samples: int, length: int, seed: int = 1, vocab: int = CONFIG["vocab_size"]) -> torch.Tensor:
    return torch.randint(0, vocab, (samples, length), generator=torch.Generator().manual_seed(seed))
