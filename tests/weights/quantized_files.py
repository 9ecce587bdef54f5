"""Writes models of one quantized layer in the public layouts, one number at a time: independent of what reads them."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

ROWS, COLUMNS = 32, 64  # of the quantized layer
LAYER = "model.layers.0.mlp.down_proj"
WEIGHT = f"{LAYER}.weight"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": ROWS,
    "intermediate_size": COLUMNS,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs lies at each place of a word


def saved(folder, tensors, settings, **changes):
    """A model whose other layers are floats; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = MODEL | changes | ({} if settings is None else {"quantization_config": settings})
    (folder / "config.json").write_text(json.dumps(config))
    at = "model.layers.0."
    shapes = {
        "model.embed_tokens": (16, ROWS),
        "model.norm": (ROWS,),
        f"{at}input_layernorm": (ROWS,),
        f"{at}post_attention_layernorm": (ROWS,),
        f"{at}self_attn.q_proj": (ROWS, ROWS),
        f"{at}self_attn.k_proj": (ROWS // 2, ROWS),
        f"{at}self_attn.v_proj": (ROWS // 2, ROWS),
        f"{at}self_attn.o_proj": (ROWS, ROWS),
        f"{at}mlp.gate_proj": (COLUMNS, ROWS),
        f"{at}mlp.up_proj": (COLUMNS, ROWS),
    }
    floats = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file({name: tensor.contiguous() for name, tensor in (floats | tensors).items()}, folder / "model.safetensors")
    return folder


def packed(numbers: torch.Tensor, bits: int, order=None) -> torch.Tensor:  # [n, k] -> [n, k * bits / 32] int32
    """Along the rows, the first number in the lowest bits; order: which of a word's numbers comes first, second, ..."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    words = []
    for row in numbers.tolist():
        for start in range(0, len(row), per_word):
            word = 0
            for place, offset in enumerate(order):
                word |= row[start + offset] << (place * bits)
            words.append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(words, dtype=torch.int32).view(numbers.shape[0], -1)


def gptq_tensors(codes, zeros, scale, bits, group_of=None):  # [rows, columns], [rows, groups], [rows, groups]
    columns = codes.shape[1]
    group_of = torch.arange(columns) // -(-columns // scale.shape[1]) if group_of is None else group_of
    return {
        f"{LAYER}.qweight": packed(codes, bits).T,
        f"{LAYER}.qzeros": packed(zeros.T, bits),
        f"{LAYER}.scales": scale.T,
        f"{LAYER}.g_idx": group_of.int(),
    }


def awq_tensors(codes, zeros, scale):
    return {
        f"{LAYER}.qweight": packed(codes.T, 4, AWQ_ORDER),
        f"{LAYER}.qzeros": packed(zeros.T, 4, AWQ_ORDER),
        f"{LAYER}.scales": scale.T,
    }


def compressed_tensors(codes, scale, bits, group_of=None):
    tensors = {
        f"{LAYER}.weight_packed": packed(codes, bits),
        f"{LAYER}.weight_scale": scale,
        f"{LAYER}.weight_shape": torch.tensor(codes.shape),
    }
    return tensors if group_of is None else tensors | {f"{LAYER}.weight_g_idx": group_of.int()}


def ct_config(weights, inputs=None, **changes):
    groups = {"group_0": {"targets": ["re:.*down_proj$"], "weights": {"type": "int"} | weights}}
    groups["group_0"]["input_activations"] = inputs
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | changes


def fp8_tensors(weight, scale, scale_name, input_name=None):
    tensors = {WEIGHT: weight, f"{LAYER}.{scale_name}": scale}
    return tensors if input_name is None else tensors | {f"{LAYER}.{input_name}": torch.tensor(0.25)}
