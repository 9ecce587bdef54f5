"""The table of supported architectures: how each one's config.json becomes a DecoderSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.errors import ModelError
from tokenmill.model.config_reader import ConfigReader, errors_with_path
from tokenmill.model.rope_config import layer_ropes, longest_rope, score_scale
from tokenmill.model.spec import DecoderSpec, MLASpec, MoESpec, NormPlacement, QKNorm

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}

Flag = bool | str  # fixed by the architecture, or the config key that says


def _window_everywhere(config: ConfigReader) -> list[int | None]:
    window = config.maybe_whole("sliding_window") if config.flag("use_sliding_window", True) else None
    return [window] * config.num_layers()


def _window_by_layer(full: Callable[[int, ConfigReader], bool]) -> Callable[[ConfigReader], list[int | None]]:
    """Some layers see everything: those that `layer_types` names, or else those that `full` picks."""

    def windows(config: ConfigReader) -> list[int | None]:
        layers = config.num_layers()
        window = config.maybe_whole("sliding_window") if config.flag("use_sliding_window", True) else None
        types = config.layer_types(layers)
        if types is not None:
            return [window if kind == "sliding_attention" else None for kind in types]
        return [None if full(layer, config) else window for layer in range(layers)]

    return windows


def _mixtral_moe(config: ConfigReader) -> MoESpec:
    return MoESpec(
        layers=(True,) * config.num_layers(),
        experts=config.whole("num_local_experts"),
        top_k=config.whole("num_experts_per_tok"),
        intermediate=config.whole("intermediate_size"),
        normalize=True,
    )


def _qwen3_moe(config: ConfigReader) -> MoESpec:
    step, dense = config.whole("decoder_sparse_step"), config.wholes("mlp_only_layers")
    return MoESpec(
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_layers())),
        experts=config.whole("num_local_experts" if config.has("num_local_experts") else "num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        intermediate=config.whole("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", False),
    )


def _deepseek_moe(config: ConfigReader) -> MoESpec:
    layers, first = config.num_layers(), config.whole("first_k_dense_replace", low=0)
    step, inner = config.whole("moe_layer_freq"), config.whole("moe_intermediate_size")
    method = config.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method {method!r} in config.json is not supported; greedy, group_limited_greedy are")
    grouped = method == "group_limited_greedy"
    return MoESpec(
        layers=tuple(i >= first and i % step == 0 for i in range(layers)),
        experts=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        intermediate=inner,
        shared_intermediate=inner * (config.maybe_whole("n_shared_experts") or 0),
        normalize=config.flag("norm_topk_prob", False),
        scale=config.number("routed_scaling_factor"),
        groups=config.whole("n_group") if grouped else 1,
        top_groups=config.whole("topk_group") if grouped else 1,
    )


def _deepseek_mla(config: ConfigReader) -> MLASpec:
    return MLASpec(
        q_rank=config.maybe_whole("q_lora_rank"),
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        v_dim=config.whole("v_head_dim"),
    )


@dataclass(frozen=True)
class Family:
    """One row of the table: what the architecture fixes, and what its config.json may leave out."""

    model_types: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    norms: NormPlacement = "pre"
    norm_offset: bool = False
    qk_norm: QKNorm = "none"
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    activation_key: str = "hidden_act"
    scaled_embedding: bool = False  # by the square root of the hidden size
    windows: Callable[[ConfigReader], list[int | None]] = lambda config: [None] * config.num_layers()
    moe: Callable[[ConfigReader], MoESpec] | None = None
    mla: Callable[[ConfigReader], MLASpec] | None = None


_ATTENTION_BIAS = Family((), qkv_bias="attention_bias", o_bias="attention_bias")
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA = replace(
    _ATTENTION_BIAS,
    norms="sandwich",
    norm_offset=True,
    activation_key="hidden_activation",
    scaled_embedding=True,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": replace(_ATTENTION_BIAS, model_types=("llama",), mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        ("mistral",), {"num_key_value_heads": 8, "sliding_window": 4096}, windows=_window_everywhere
    ),
    "Qwen2ForCausalLM": Family(
        ("qwen2",),
        _QWEN_WINDOWS,
        qkv_bias=True,
        windows=_window_by_layer(lambda layer, config: layer < config.whole("max_window_layers", low=0)),
    ),
    "Qwen3ForCausalLM": replace(
        _ATTENTION_BIAS,
        model_types=("qwen3",),
        defaults=_QWEN_WINDOWS | {"head_dim": 128},
        qk_norm="head",
        windows=_window_by_layer(lambda layer, config: layer < config.whole("max_window_layers", low=0)),
    ),
    "Phi3ForCausalLM": Family(("phi3",), {"rms_norm_eps": 1e-5}, windows=_window_everywhere),
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        model_types=("gemma2",),
        defaults=_GEMMA_DEFAULTS
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "max_position_embeddings": 8192},
        windows=_window_by_layer(lambda layer, config: layer % 2 == 1),
    ),
    "Gemma3ForCausalLM": replace(
        _GEMMA,
        model_types=("gemma3_text", "gemma3"),
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        qk_norm="head",
        windows=_window_by_layer(lambda layer, config: (layer + 1) % config.whole("sliding_window_pattern") == 0),
    ),
    "Olmo2ForCausalLM": replace(
        _ATTENTION_BIAS, model_types=("olmo2",), defaults={"rms_norm_eps": 1e-5}, norms="post", qk_norm="full"
    ),
    "MixtralForCausalLM": Family(
        ("mixtral",),
        {
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        windows=_window_everywhere,
        moe=_mixtral_moe,
    ),
    "Qwen3MoeForCausalLM": replace(
        _ATTENTION_BIAS,
        model_types=("qwen3_moe",),
        defaults={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        qk_norm="head",
        windows=_window_everywhere,
        moe=_qwen3_moe,
    ),
    "DeepseekV2ForCausalLM": Family(
        ("deepseek_v2",),
        {
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 2,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        mlp_bias="mlp_bias",
        moe=_deepseek_moe,
        mla=_deepseek_mla,
    ),
}
# Multimodal wrappers whose text part is one of the above.
_WRAPPERS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
_DEFAULTS = {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}


def spec_from_config(config: dict[str, Any]) -> DecoderSpec:
    """Read a Hugging Face config.json. Raises ModelError for what cannot be served, with the path of a stored one."""
    with errors_with_path(config):
        return _read(config)


def _read(config: dict[str, Any]) -> DecoderSpec:
    architecture = architecture_of(config)
    family = FAMILIES[architecture]
    nested = config.get("text_config")
    if isinstance(nested, dict):  # special tokens and dtype may stand outside
        config = config | nested
    reader = ConfigReader(config, _DEFAULTS | family.defaults)
    spec = _build(architecture, family, reader)
    _check(spec, reader)
    return spec


def architecture_of(config: dict[str, Any]) -> str:
    """The row of the table that a config belongs to, by `architectures` or else by `model_type`."""
    named = config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    for name in names:
        name = _WRAPPERS.get(name, name)
        if name in FAMILIES:
            return name
    if not names:
        for name, family in FAMILIES.items():
            if config.get("model_type") in family.model_types:
                return name
    unknown = names[0] if names else config.get("model_type")
    if unknown is None:
        raise ModelError("config.json names no architecture: it has neither `architectures` nor `model_type`")
    raise ModelError(f"architecture {unknown!r} is not supported; supported are {', '.join(FAMILIES)}")


def _build(architecture: str, family: Family, config: ConfigReader) -> DecoderSpec:
    layers, hidden, heads = config.num_layers(), config.whole("hidden_size"), config.whole("num_attention_heads")
    mla = family.mla(config) if family.mla else None
    head_dim = mla.nope_dim + mla.rope_dim if mla else _head_dim(config, hidden, heads)
    windows = tuple(family.windows(config))
    rotated = mla.rope_dim if mla else int(head_dim * config.partial_rotary_factor() + 1e-6)
    ropes = layer_ropes(config, rotated, windows)
    scored = config.maybe_number("query_pre_attn_scalar") or float(head_dim)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.whole("vocab_size"),
        hidden=hidden,
        num_layers=layers,
        heads=heads,
        kv_heads=config.maybe_whole("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=config.whole("intermediate_size"),
        norm_eps=config.number("rms_norm_eps"),
        max_positions=max(config.whole("max_position_embeddings"), longest_rope(ropes)),
        ropes=ropes,
        windows=windows,
        attn_scale=scored**-0.5 * (score_scale(config) if mla else 1.0),
        activation=_activation(config, family.activation_key),
        norms=family.norms,
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        qkv_bias=_flag(config, family.qkv_bias),
        o_bias=_flag(config, family.o_bias),
        mlp_bias=_flag(config, family.mlp_bias),
        embed_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        attn_softcap=config.maybe_number("attn_logit_softcapping"),
        logit_softcap=config.maybe_number("final_logit_softcapping"),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        moe=family.moe(config) if family.moe else None,
        mla=mla,
        eos_ids=config.ids("eos_token_id"),
        bos_id=next(iter(config.ids("bos_token_id")), None),
        dtype=config.dtype_name(),
    )


def _check(spec: DecoderSpec, config: ConfigReader) -> None:
    """Refuse what would otherwise fail, or be silently wrong, deep inside a forward pass."""
    if spec.heads % spec.kv_heads:
        raise ModelError(f"config.json has {spec.heads} heads, which {spec.kv_heads} key-value heads do not divide")
    if spec.mla and config.flag("attention_bias", False):
        raise ModelError("config.json has attention_bias=true, which is not supported with latent attention")
    if config.flag("use_bidirectional_attention", False):
        raise ModelError("config.json has use_bidirectional_attention=true; only causal models can generate")
    moe = spec.moe
    if moe and not any(moe.layers):
        raise ModelError("config.json describes a mixture of experts in which no layer has experts")
    if moe and (moe.top_k > moe.experts or moe.experts % moe.groups or moe.top_groups > moe.groups):
        raise ModelError(
            f"config.json routes to {moe.top_k} of {moe.experts} experts in {moe.top_groups} of {moe.groups} groups,"
            " which cannot be"
        )


def _head_dim(config: ConfigReader, hidden: int, heads: int) -> int:
    head_dim = config.maybe_whole("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ModelError(f"config.json has hidden_size {hidden}, which {heads} heads do not divide; set head_dim")
        head_dim = hidden // heads
    return head_dim


def _activation(config: ConfigReader, key: str) -> str:
    name = config.text(key)
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} ({key} in config.json) is not supported; {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


def _flag(config: ConfigReader, flag: Flag) -> bool:
    return config.flag(flag, False) if isinstance(flag, str) else flag
