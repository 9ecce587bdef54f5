"""Shapes of public models that the plan tests use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tokenmill.model.families import spec_from_config
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.names import recipes
from tokenmill.plan.solve.shape import ModelShape, shape_of

_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "head_dim": 128, "dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 151645,
    },
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 5e5, "tie_word_embeddings": False, "eos_token_id": 128001,
    },
    "llama3-70b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 5e5, "tie_word_embeddings": False, "eos_token_id": 128001,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 151645,
    },
}  # fmt: skip


def spec(name: str) -> DecoderSpec:
    return spec_from_config(_COMMON | CONFIGS[name])


def write_weights(folder: Path) -> None:
    """Random weights in bfloat16, as the folder's config.json asks for them."""
    ways = recipes(spec_from_config(json.loads((folder / "config.json").read_text())))
    pieces = {piece.source: piece.shape for found in ways.values() for piece in found[0]}
    weights = {name: 0.02 * torch.randn(shape) for name, shape in pieces.items()}
    save_file({name: one.bfloat16() for name, one in weights.items()}, folder / "model.safetensors")


def shape(name: str) -> ModelShape:
    return shape_of(spec(name), name)
