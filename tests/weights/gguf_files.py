"""Writes small GGUF files for the tests, with the gguf package and independently of the reader under test."""

from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

# model_type -> GGUF architecture
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
}


def convert(folder: Path, config, target: Path, extra_tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A saved transformers model as GGUF in float32, the way the public converter writes it."""
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    _write_settings(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, values in _stack_experts(load_file(folder / "model.safetensors")).items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            values = _interleave(values, config.num_attention_heads)
        if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            values = _interleave(values, config.num_key_value_heads)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        writer.add_tensor(mapped, values.float().numpy())
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    return finish(writer, target)


def finish(writer: gguf.GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def tiny_model(
    target: Path,
    layers: int = 2,
    hidden: int = 64,
    seed: int = 0,
    tokens: int = 0,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
) -> Path:
    """A llama of a few kilobytes, quantized, with the vocabulary below and so many unused tokens more."""
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // 4)
    add_byte_level_vocabulary(writer, tokens)
    shapes = {"token_embd": (260 + tokens, hidden), "output": (260 + tokens, hidden), "output_norm": (hidden,)}
    for index in range(layers):
        block = {"attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden)}
        block |= {"attn_output": (hidden, hidden), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
        block |= {"ffn_gate": (2 * hidden, hidden), "ffn_up": (2 * hidden, hidden), "ffn_down": (hidden, 2 * hidden)}
        shapes |= {f"blk.{index}.{name}": shape for name, shape in block.items()}
    draw = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
        else:
            values = draw.normal(0, 0.2, shape).astype(np.float32)
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    return finish(writer, target)


def add_byte_level_vocabulary(writer: gguf.GGUFWriter, unused: int = 0) -> None:
    """A vocabulary of the 256 bytes, two merges and two control tokens."""
    alphabet = sorted(byte_alphabet())
    tokens = ["<|end|>", "<|start|>", *alphabet, "he", "hel", *(f"unused {i}" for i in range(unused))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _write_settings(writer: gguf.GGUFWriter, config) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (whole.get("partial_rotary_factor") or 1.0)))
    if whole["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    if whole["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(whole["attention_factor"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    result = {}
    for name, values in tensors.items():
        if ".experts." not in name:
            result[name] = values
            continue
        before, after = name.split(".experts.")
        index, rest = after.split(".", 1)
        stacks.setdefault(f"{before}.experts.{rest}", {})[int(index)] = values
    for name, parts in stacks.items():
        result[name] = torch.stack([parts[index] for index in range(len(parts))])
    return result


def _interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
