"""The smallest model that tests run: a config of a few kilobytes of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tokenmill.model.layers import WeightStore
    from tokenmill.model.spec import DecoderSpec

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


def logits_of(spec: DecoderSpec, weights: WeightStore, ids: torch.Tensor) -> torch.Tensor:  # [rows, length, vocab]
    """Of texts of one length, from their beginnings, in torch's own ops."""
    import torch

    from tokenmill.model.decoder import Decoder
    from tokenmill.ops.registry import Need
    from tokenmill.quant.tool.calibrate import plain_ops
    from tokenmill.quant.tool.evaluate import hidden_of

    ops = plain_ops(Need("cpu", torch.float32, spec.attention_head_dim))
    hidden = hidden_of(spec, weights, ids)
    with torch.inference_mode():
        return Decoder(spec, weights, ops, max_len=1).logits(hidden)
