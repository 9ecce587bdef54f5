"""Tiny random models of every supported architecture, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
QWEN3_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
    "partial_rotary_factor": 0.5,
}

# case -> (architecture, what differs from SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "phi3-window-partial": (
        "Phi3",
        {"sliding_window": 9, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
    ),
    "phi3-longrope-short": ("Phi3", {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE}),
    "phi3-longrope-long": ("Phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "gemma2": ("Gemma2", {**GEMMA, "sliding_window": 9, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": 28,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
}


def make(case: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A model whose random weights are large enough for logits to be far apart, and whose norms and biases matter."""
    architecture, differences = CASES[case]
    name = "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config"
    config = getattr(transformers, name)(**{**SIZES, **differences}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    offset = 0.0 if architecture.startswith("Gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(offset, 0.2)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
            elif "embed" in name and architecture.startswith("Gemma"):
                # Scaled up and tied: larger ones would make it repeat its input.
                parameter.normal_(0, 0.3 * parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model
