"""Builds a Hugging Face style config.json dictionary from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill.errors import ModelError
from tokenmill.model.weights.gguf_file import TensorInfo

Number = TypeVar("Number", int, float)

# GGUF architecture -> (architecture class, model_type)
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
}

# Depth of the 27B models, the only ones whose attention scale is not that of head_dim; no metadata says so.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA_PATTERN = {"gemma2": 2, "gemma3": 6}  # every so many layers, one sees the whole context
_FLOAT_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_MAX_LAYERS = 4096


def build_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    rope_tensors: Mapping[str, npt.NDArray[np.float32]],  # decoded frequency factors, by GGUF name
    path: str,
) -> dict[str, Any]:
    """The config of the model in `path`; a ModelError names what is missing or makes no sense."""
    fields = _Fields(metadata, path)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path} has no token_embd.weight matrix; it is not a complete language model")
    config = _common(fields, embedding, tensors)
    config |= _mixture(fields)
    config |= _attention(fields, config, tensors)
    config |= _rope(fields, config, rope_tensors)
    config |= _special_ids(metadata)
    return config


def _common(fields: _Fields, embedding: TensorInfo, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    architecture, model_type = _ARCHITECTURES[fields.architecture]
    hidden = fields.whole("embedding_length")
    if embedding.shape[1] != hidden:
        raise ModelError(f"{fields.path} has embeddings of {embedding.shape[1]} values, not {hidden}; it is damaged")
    formats = {info.type_id for info in tensors.values() if len(info.shape) > 1}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.whole("block_count", high=_MAX_LAYERS),
        "intermediate_size": fields.whole("feed_forward_length"),
        "max_position_embeddings": fields.whole("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "hidden_act": "gelu_pytorch_tanh" if fields.is_gemma else "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _FLOAT_TYPES.get(formats.pop()) if len(formats) == 1 else None,
    }


def _mixture(fields: _Fields) -> dict[str, Any]:
    experts = fields.whole("expert_count", default=0, low=0)
    if not experts:
        return {}
    used = {"num_experts_per_tok": fields.whole("expert_used_count", high=experts)}
    if fields.architecture == "llama":
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts, **used}
    return {
        "num_experts": experts,
        "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **used,
    }


def _attention(fields: _Fields, config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    heads = fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", default=config["hidden_size"] // heads)
    found: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "sliding_window": fields.whole("attention.sliding_window", default=0, low=0) or None,
    }
    if fields.architecture == "llama" and found["sliding_window"] and config["model_type"] == "llama":
        found |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if fields.is_gemma:
        found |= _gemma(fields, config["hidden_size"], config["num_hidden_layers"], heads, head_dim)
    return found


def _gemma(fields: _Fields, hidden: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    large = layers == _GEMMA_27B_LAYERS[fields.architecture]
    period = _GEMMA_PATTERN[fields.architecture]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if large else head_dim,
        "attn_logit_softcapping": fields.real("attn_logit_softcapping", default=0.0) or None,
        "final_logit_softcapping": fields.real("final_logit_softcapping", default=0.0) or None,
        "layer_types": [
            "full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)
        ],
    }


def _rope(fields: _Fields, config: dict[str, Any], tensors: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    rotated = fields.whole("rope.dimension_count", default=head_dim, high=head_dim)
    found: dict[str, Any] = {
        "rope_theta": fields.real("rope.freq_base", default=10000.0),
        "partial_rotary_factor": rotated / head_dim,
        "rope_scaling": _scaling(fields, config["max_position_embeddings"], tensors, rotated),
    }
    if fields.architecture == "gemma3":
        found["rope_local_base_freq"] = fields.real("rope.freq_base_swa", default=10000.0)
    if "rope_factors_long.weight" in tensors:
        found["original_max_position_embeddings"] = found["rope_scaling"]["original_max_position_embeddings"]
    return found


def _scaling(
    fields: _Fields, context: int, tensors: Mapping[str, npt.NDArray[np.float32]], rotated: int
) -> dict[str, Any] | None:
    """The rope scaling. Frequency factors are stored as such, so they are given in the one form that lists them."""
    original = fields.whole("rope.scaling.original_context_length", default=context)
    long = tensors.get("rope_factors_long.weight", tensors.get("rope_freqs.weight"))
    if long is not None:
        short = tensors.get("rope_factors_short.weight", long)
        if any(factors.shape != (rotated // 2,) or not (factors > 0).all() for factors in (short, long)):
            raise ModelError(f"{fields.path} has rope factors that do not fit {rotated} dimensions; it is damaged")
        return {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "attention_factor": fields.real("rope.scaling.attn_factor", default=1.0),
            "original_max_position_embeddings": original,
        }
    kind = str(fields.get("rope.scaling.type", "none"))
    factor = fields.real("rope.scaling.factor", default=fields.real("rope.scale_linear", default=1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        extra = fields.real("rope.scaling.attn_factor", default=1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": extra * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        }
    raise ModelError(f"{fields.path} uses rope scaling {kind!r}; supported are linear, yarn and stored factors")


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    ids = {name: value for name, value in named.items() if isinstance(value, int)}
    stops = dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids)
    return {"bos_token_id": ids.get("bos"), "eos_token_id": list(stops)}


class _Fields:
    """Typed, range-checked access to the metadata of the file's architecture."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self._metadata = metadata
        self.path = path
        self.architecture = str(metadata.get("general.architecture", ""))
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path} holds architecture {self.architecture!r}; supported in GGUF are {', '.join(_ARCHITECTURES)}"
            )
        self.is_gemma = self.architecture.startswith("gemma")

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.architecture}.{key}", default)

    def whole(self, key: str, *, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # given per layer, the same for all
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"a whole number from {low} to {high}")
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._wrong(key, value, "a number of at least 0")
        return float(value)

    def _wrong(self, key: str, value: Any, expected: str) -> ModelError:
        shown = str(value)[:80]
        return ModelError(
            f"{self.path} has {self.architecture}.{key} = {shown} where {expected} is needed; "
            "the file is damaged or of a kind that is not supported"
        )
