"""The default model as transformers computes it, from weights that the gguf package dequantizes."""

from __future__ import annotations

import gguf
import torch
import transformers

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_llama(path: str) -> transformers.LlamaForCausalLM:
    """In float32. Shares no code with the loader under test."""
    reader = gguf.GGUFReader(path)
    config = _config(reader)
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor.name.removesuffix(".weight")
        if name == "token_embd":
            weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = values
        elif name == "output_norm":
            weights["model.norm.weight"] = values
        else:
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                values = _halves(values, heads)
            weights[f"model.layers.{layer}.{_NAMES[part]}.weight"] = values
    model.load_state_dict(weights, strict=True)
    return model


def _config(reader: gguf.GGUFReader) -> transformers.LlamaConfig:
    def read(name: str) -> float:
        return reader.get_field(f"llama.{name}").contents()

    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return transformers.LlamaConfig(
        vocab_size=int(embedding.shape[1]),
        hidden_size=read("embedding_length"),
        intermediate_size=read("feed_forward_length"),
        num_hidden_layers=read("block_count"),
        num_attention_heads=read("attention.head_count"),
        num_key_value_heads=read("attention.head_count_kv"),
        max_position_embeddings=read("context_length"),
        rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
        rope_theta=read("rope.freq_base"),
        tie_word_embeddings=True,
    )


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two numbers that rotate together side by side; transformers keeps them half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
