"""EagleHead: an EAGLE-3 head as its public formats have it, a draft layer that reads three hidden states of its target.

A folder with `config.json` and `model.safetensors`, written by the `speculators` library (`speculators_model_type`:
eagle3), or in the naming of SafeAILab and SpecForge (`midlayer.*`, `draft_vocab_size`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import ModelError
from tokenmill.model.config_reader import StoredConfig
from tokenmill.model.families import spec_from_config
from tokenmill.model.spec import DecoderSpec

FILE = "model.safetensors"
_CONFIG_BYTES = 1 << 20
_PICKLED = ("pytorch_model.bin", "model.pt", "model.pth")
SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
OTHERS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
# What the library's configs leave out where it is the default of the layer's own architecture
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32,
    },
}  # fmt: skip
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_UNREAD = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's own


@dataclass(frozen=True)
class EagleHead:
    """Drafts from what its target computed for a token and from the token that follows it.

    With f, the residuals that three layers of the target start from, side by side, and E, the embeddings as they are
    stored: the layer reads norm(E[next token]) beside hidden_norm(g), where g = fc(f) for tokens that the target has
    computed, and for drafts what the layer itself gave for the token before. Its residual is g; its logits are over the
    draft vocabulary. It caches keys and values of its own, for every token.
    """

    spec: DecoderSpec  # of the layer
    layers: tuple[int, ...]  # of the target
    tensors: Mapping[str, torch.Tensor]  # by canonical name of `spec`, and fc, hidden_norm, feature_norm
    ids: torch.Tensor  # [draft vocabulary]: the target's token ids
    norm_before_residual: bool = False  # the residual is hidden_norm(g)
    norm_output: bool = False  # what drafts go on from is normed
    feature_norms: int = 0  # norms over equal parts of f; 0: f is not normed

    @classmethod
    def load(cls, folder: str | Path, target: DecoderSpec) -> EagleHead:
        """Tensors as they are stored; refused in a sentence where it is none for a model of this shape."""
        folder = Path(folder)
        config = _config(folder)
        spec = _layer_spec(folder, config)
        if spec.vocab_size != target.vocab_size:
            raise ModelError(
                f"{folder} drafts for a vocabulary of {spec.vocab_size} tokens, and this model has "
                f"{target.vocab_size}; take a head that was trained for it"
            )
        layers = _layers(folder, config, target)
        stored = _Stored(folder)
        draft_vocab = config.get("draft_vocab_size") or spec.vocab_size
        if type(draft_vocab) is not int or not 1 <= draft_vocab <= spec.vocab_size:
            raise ModelError(
                f"{folder}/config.json has draft_vocab_size {draft_vocab!r:.20}; it must be a number from 1 to "
                f"{spec.vocab_size}"
            )
        tensors, norms = _tensors(stored, config, spec, target.hidden, len(layers), draft_vocab)
        ids = _ids(stored, draft_vocab, spec.vocab_size)
        stored.check_all_taken()
        before, output = (_flag(folder, config, name) for name in ("norm_before_residual", "norm_output"))
        return cls(spec, layers, tensors, ids, before, output, norms)


def is_eagle(path: str | Path) -> bool:
    """Whether there is a folder of such a head, or of another one of its formats, which `load` then refuses."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return False
    config = _config(folder)
    named = config.get("architectures")
    return (
        "speculators_model_type" in config
        or "draft_vocab_size" in config
        or (isinstance(named, list) and any("Eagle3" in str(one) for one in named))
    )


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        if file.stat().st_size > _CONFIG_BYTES:
            raise ValueError(f"{file.stat().st_size} bytes")
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again") from None
    return found if isinstance(found, dict) else {}


def _layer_spec(folder: Path, config: dict[str, Any]) -> DecoderSpec:
    """Of the draft layer, from whichever format the config is in."""
    inner: Any = config
    if "speculators_model_type" in config:
        kind, inner = config["speculators_model_type"], config.get("transformer_layer_config")
        if kind != "eagle3":
            raise ModelError(
                f"{folder} is a speculator of type {kind!r:.40}; of the library's types only eagle3 drafts"
            )
        if not isinstance(inner, dict):
            raise ModelError(f"{folder}/config.json has no transformer_layer_config; download the head again")
    named = config.get("architectures")
    known = SPECULATORS if inner is not config else OTHERS
    if not isinstance(named, list) or not named or any(one not in known for one in named):
        raise ModelError(f"{folder} has the architectures {named!r:.80}; EAGLE-3 heads have one of {', '.join(known)}")
    family = inner.get("model_type", "llama")
    if family not in _FAMILIES:
        raise ModelError(f"{folder} has a draft layer of type {family!r:.40}; supported are {', '.join(_FAMILIES)}")
    if "sliding_attention" in str(inner.get("layer_types")):
        raise ModelError(f"{folder} has a draft layer with a sliding window, which is not supported; take another head")
    left_out = _LEFT_OUT[family] if inner is not config else {}
    whole = left_out | inner | {"architectures": [_FAMILIES[family]], "tie_word_embeddings": False}
    spec = spec_from_config(StoredConfig(whole, folder / "config.json"))
    if spec.num_layers != 1:
        raise ModelError(f"{folder} has {spec.num_layers} draft layers; heads of one layer are supported")
    return spec


def _layers(folder: Path, config: dict[str, Any], target: DecoderSpec) -> tuple[int, ...]:
    """Layers of the target, by the residual that they start from: what vLLM and `speculators` count."""
    ids, count = config.get("eagle_aux_hidden_state_layer_ids"), target.num_layers
    nested = config.get("eagle_config")
    if ids is None and isinstance(nested, dict) and nested.get("eagle_aux_hidden_state_layer_ids") is not None:
        ids = nested["eagle_aux_hidden_state_layer_ids"]  # SpecForge counts the layers that end with it
        ids = [one + 1 if type(one) is int else one for one in ids] if isinstance(ids, list) else ids
    if ids is None:
        ids = [2, count // 2, count - 3]
    fits = isinstance(ids, list) and ids and all(type(one) is int and 0 <= one < count for one in ids)
    if not fits or len(set(ids)) != len(ids):
        raise ModelError(
            f"{folder} reads what the layers {ids!r:.60} start from, and this model has {count} layers; take a head "
            "that was trained for it"
        )
    return tuple(ids)


class _Stored:
    """The tensors of a head's file, taken one by one and checked."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        if not self.file.is_file():
            pickled = next((name for name in _PICKLED if (folder / name).is_file()), None)
            why = "nothing of that name" if pickled is None else f"only {pickled}, which may run code when it is read"
            raise ModelError(f"there is no {self.file} ({why}); convert the head to safetensors")
        try:
            with safe_open(self.file, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{self.file} is truncated, or no safetensors file ({error}); download it again") from None
        # SafeAILab's name of the layer, and how some files write the others
        self._left = {name.removeprefix("model.").replace("midlayer.", "layers.0."): one for name, one in found.items()}

    def has(self, name: str) -> bool:
        return name in self._left

    def raw(self, name: str) -> torch.Tensor | None:
        found: torch.Tensor | None = self._left.pop(name, None)
        return found

    def take(self, name: str, *shape: int) -> torch.Tensor:
        found = self.raw(name)
        if found is None:
            raise ModelError(f"{self.file} lacks {name}; it is not whole, or of another format")
        if tuple(found.shape) != shape:
            raise ModelError(
                f"{self.file} has {name} of shape {tuple(found.shape)}, and for this model it would be {shape}; take a "
                "head that was trained for it"
            )
        if found.dtype not in _FLOATS:
            raise ModelError(f"{self.file} has {name} in {found.dtype}; take the head as it was before quantization")
        if not found.isfinite().all():
            raise ModelError(f"{self.file} has weights in {name} that are NaN or infinite; download it again")
        return found

    def join(self, names: list[tuple[str, int]], *columns: int) -> torch.Tensor:
        return torch.cat([self.take(name, rows, *columns) for name, rows in names])

    def check_all_taken(self) -> None:
        unknown = sorted(name for name in self._left if name not in _UNREAD and not name.endswith("inv_freq"))
        if unknown:
            raise ModelError(f"{self.file} has {unknown[0]}, which no EAGLE-3 head of one layer has; take another head")


def _tensors(
    stored: _Stored, config: dict[str, Any], spec: DecoderSpec, hidden: int, layers: int, draft_vocab: int
) -> tuple[dict[str, torch.Tensor], int]:
    """All tensors, and how many norms the features have; hidden: the target's width."""
    width, folder = spec.hidden, stored.file.parent
    found: dict[str, torch.Tensor] = {}
    if stored.has("embed_tokens.weight"):
        found["embed"] = stored.take("embed_tokens.weight", spec.vocab_size, width)
    elif width != hidden:
        raise ModelError(
            f"{folder} drafts for a model of hidden width {width}, and this one's is {hidden}; take a head that was "
            "trained for it"
        )
    found["fc"] = stored.take("fc.weight", width, layers * hidden)
    norms = 0
    if _flag(folder, config, "norm_before_fc"):
        norms, found["feature_norm"] = 1, stored.take("input_norm.weight", layers * hidden)
    if _flag(folder, config, "fc_norm"):
        names = [(f"fc_norm.{i}.weight", hidden) for i in range(layers)]
        norms, found["feature_norm"] = layers, stored.join(names)

    at, own = "layers.0.", "layers.0.self_attn."
    heads = [("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)]
    found[at + "qkv"] = stored.join([(f"{own}{one}_proj.weight", rows) for one, rows in heads], 2 * width)
    found[at + "o"] = stored.take(f"{own}o_proj.weight", width, spec.attention_size)
    if spec.qkv_bias:
        found[at + "qkv.bias"] = stored.join([(f"{own}{one}_proj.bias", rows) for one, rows in heads])
    if spec.o_bias:
        found[at + "o.bias"] = stored.take(f"{own}o_proj.bias", width)
    if spec.qk_norm == "head":
        for one in ("q_norm", "k_norm"):
            found[at + one] = stored.take(f"{own}{one}.weight", spec.head_dim)
    inner = [(f"{at}mlp.{one}_proj", spec.intermediate) for one in ("gate", "up")]
    found[at + "gate_up"] = stored.join([(f"{one}.weight", rows) for one, rows in inner], width)
    found[at + "down"] = stored.take(f"{at}mlp.down_proj.weight", width, spec.intermediate)
    if spec.mlp_bias:
        found[at + "gate_up.bias"] = stored.join([(f"{one}.bias", rows) for one, rows in inner])
        found[at + "down.bias"] = stored.take(f"{at}mlp.down_proj.bias", width)
    found[at + "before_attention"] = stored.take(f"{at}input_layernorm.weight", width)
    found[at + "before_mlp"] = stored.take(f"{at}post_attention_layernorm.weight", width)
    found["hidden_norm"] = stored.take(f"{at}hidden_norm.weight", width)
    found["final_norm"] = stored.take("norm.weight", width)
    found["lm_head"] = stored.take("lm_head.weight", draft_vocab, width)
    return found, norms


def _ids(stored: _Stored, draft_vocab: int, vocab: int) -> torch.Tensor:  # [draft vocabulary]
    """Of the target's tokens; the file has how far each lies behind its own place."""
    offsets, mask = stored.raw("d2t"), stored.raw("t2d")
    ids = torch.arange(draft_vocab)
    if offsets is None and draft_vocab < vocab:
        raise ModelError(f"{stored.file} lacks d2t; it is not whole, or of another format")
    if offsets is not None and draft_vocab < vocab:
        if offsets.shape != ids.shape or offsets.is_floating_point():
            raise ModelError(
                f"{stored.file} has d2t of shape {tuple(offsets.shape)}, not ({draft_vocab},) whole numbers"
            )
        ids = ids + offsets.long()
        if ids.min() < 0 or ids.max() >= vocab or len(set(ids.tolist())) != draft_vocab:
            raise ModelError(
                f"{stored.file} drafts tokens twice, or outside the vocabulary of {vocab}; take another head"
            )
        if mask is not None and (mask.shape != (vocab,) or not mask.bool()[ids].all()):
            raise ModelError(f"{stored.file} has t2d and d2t that contradict each other; download it again")
    return ids


def _flag(folder: Path, config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{folder}/config.json has {name}={value!r:.40}; it must be true or false")
    return bool(value)
