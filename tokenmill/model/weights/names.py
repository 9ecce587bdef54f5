"""Which checkpoint tensors make up each of the decoder's parameters, and what is done to them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from tokenmill.model.spec import NORM_NAMES, DecoderSpec, MLASpec, MoESpec, NormPlacement

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, and the part of a parameter that it fills."""

    source: str
    shape: tuple[int, ...]  # what the source must have
    first: int = 0  # the part begins at this row of the parameter ...
    expert: int | None = None  # ... or of this expert's matrix in it
    change: Change | None = None  # one that leaves the rows of a head among themselves
    unit: int = 1  # rows of the source that make up one row of the parameter


Recipe = list[Piece]


def recipes(spec: DecoderSpec) -> dict[str, list[Recipe]]:
    """For every parameter of the whole model, the ways in which checkpoints store it, the most common first."""
    spec = spec.whole
    offset = _plus_one if spec.norm_offset else None
    found = {
        "embed": [[Piece("model.embed_tokens.weight", (spec.vocab_size, spec.hidden))]],
        "final_norm": [[Piece("model.norm.weight", (spec.hidden,), change=offset)]],
        "lm_head": [[Piece("lm_head.weight", (spec.vocab_size, spec.hidden))]],
    }
    first = 0 if spec.stage is None else spec.stage.layers.start
    for index in range(spec.num_layers):
        at = f"model.layers.{first + index}."
        layer = _norms(spec, at) | (_latent(spec, spec.mla, at) if spec.mla else _attention(spec, at))
        if spec.moe is not None and spec.is_moe(index):
            layer |= _mixture(spec, spec.moe, at)
        else:
            layer |= _mlp(spec, "", at + "mlp.", spec.intermediate)
        found |= {f"layers.{index}.{name}": ways for name, ways in layer.items()}
    return {name: found[name] for name in spec.parameters()}


def spelled_as_in_transformers(names: Iterable[str]) -> dict[str, str]:
    """The names as recipes spell them -> as the checkpoint does, which may hold a bare or a multimodal model."""
    return {_as_in_transformers(name): name for name in names}


def is_harmless(spec: DecoderSpec, name: str) -> bool:
    """Whether a name that no recipe uses can be left out without changing the result."""
    if name == "lm_head.weight":
        return spec.tie_embeddings
    constant = name.endswith(("rotary_emb.inv_freq", ".masked_bias"))  # the decoder computes its own
    return constant or name.startswith(_OTHER_MODALITIES)


_OTHER_MODALITIES = tuple(
    prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
)
_TEXT_PARTS = ("language_model.model.", "model.language_model.")
_LAYER_NORMS: dict[NormPlacement, tuple[str, ...]] = {  # in the order of NORM_NAMES
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def _as_in_transformers(name: str) -> str:
    for prefix in _TEXT_PARTS:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    if name.startswith(("embed_tokens.", "layers.", "norm.")):
        return "model." + name
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name


def _norms(spec: DecoderSpec, at: str) -> dict[str, list[Recipe]]:
    change = _plus_one if spec.norm_offset else None
    names = zip(NORM_NAMES[spec.norms], _LAYER_NORMS[spec.norms], strict=True)
    found = {ours: [[Piece(f"{at}{theirs}.weight", (spec.hidden,), change=change)]] for ours, theirs in names}
    if spec.mla is None and spec.qk_norm != "none":
        full = spec.qk_norm == "full"
        for ours, size in (("q_norm", spec.q_size), ("k_norm", spec.kv_size)):
            shape = (size if full else spec.head_dim,)
            found[ours] = [[Piece(f"{at}self_attn.{ours}.weight", shape, change=change)]]
    return found


def _attention(spec: DecoderSpec, at: str) -> dict[str, list[Recipe]]:
    at += "self_attn."
    parts = [("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)]
    return _linear("qkv", at, [parts, [("qkv_proj", spec.qkv_size)]], spec.hidden) | _linear(
        "o", at, [[("o_proj", spec.hidden)]], spec.attention_size
    )


def _mlp(spec: DecoderSpec, prefix: str, at: str, inner: int) -> dict[str, list[Recipe]]:
    parts = [("gate_proj", inner), ("up_proj", inner)]
    return _linear(f"{prefix}gate_up", at, [parts, [("gate_up_proj", 2 * inner)]], spec.hidden) | _linear(
        f"{prefix}down", at, [[("down_proj", spec.hidden)]], inner
    )


def _linear(name: str, at: str, ways: list[list[tuple[str, int]]], columns: int) -> dict[str, list[Recipe]]:
    """A weight and its bias, made of (source, rows) stacked in order."""
    found: dict[str, list[Recipe]] = {name: [], f"{name}.bias": []}
    for parts in ways:
        first, weight, bias = 0, [], []
        for source, rows in parts:
            weight.append(Piece(f"{at}{source}.weight", (rows, columns), first))
            bias.append(Piece(f"{at}{source}.bias", (rows,), first))
            first += rows
        found[name].append(weight)
        found[f"{name}.bias"].append(bias)
    return found


def _latent(spec: DecoderSpec, mla: MLASpec, at: str) -> dict[str, list[Recipe]]:
    at += "self_attn."
    split, rank = partial(_query_rows, mla), mla.kv_rank
    query_rows = spec.heads * (mla.nope_dim + mla.rope_dim)
    query = Piece(f"{at}q_proj.weight", (query_rows, spec.hidden), change=split)
    found: dict[str, list[Recipe]] = {}
    if mla.q_rank is not None:
        query = Piece(f"{at}q_a_proj.weight", (mla.q_rank, spec.hidden))
        found["q_norm"] = [[Piece(f"{at}q_a_layernorm.weight", (mla.q_rank,))]]
        found["q_up"] = [[Piece(f"{at}q_b_proj.weight", (query_rows, mla.q_rank), change=split)]]
    change = partial(_key_rows, mla)
    down = Piece(f"{at}kv_a_proj_with_mqa.weight", (rank + mla.rope_dim, spec.hidden), spec.q_size, change=change)
    found["qkv"] = [[query, down]]
    found["kv_norm"] = [[Piece(f"{at}kv_a_layernorm.weight", (rank,))]]
    per_head = mla.nope_dim + mla.v_dim
    up = (spec.heads * per_head, rank)
    for name, rows in (("k_up", slice(None, mla.nope_dim)), ("v_up", slice(mla.nope_dim, None))):
        change = partial(_per_head, per_head, rows)
        found[name] = [[Piece(f"{at}kv_b_proj.weight", up, change=change, unit=per_head)]]
    return found | _linear("o", at, [[("o_proj", spec.hidden)]], spec.attention_size)


def _mixture(spec: DecoderSpec, moe: MoESpec, at: str) -> dict[str, list[Recipe]]:
    """Each expert by itself, in two spellings, or all of them stacked."""
    inner, hidden = moe.intermediate, spec.hidden
    gate_up, down = [], []
    for block, gate, up, out in (
        ("mlp", "gate_proj", "up_proj", "down_proj"),
        ("block_sparse_moe", "w1", "w3", "w2"),
    ):
        experts = [(expert, f"{at}{block}.experts.{expert}.") for expert in range(moe.experts)]
        gate_up.append(
            [
                Piece(f"{where}{name}.weight", (inner, hidden), first, expert)
                for expert, where in experts
                for name, first in ((gate, 0), (up, inner))
            ]
        )
        down.append([Piece(f"{where}{out}.weight", (hidden, inner), 0, expert) for expert, where in experts])
    gate_up.append([Piece(f"{at}mlp.experts.gate_up_proj", (moe.experts, 2 * inner, hidden))])
    down.append([Piece(f"{at}mlp.experts.down_proj", (moe.experts, hidden, inner))])
    router = [[Piece(f"{at}{block}.gate.weight", (moe.experts, hidden))] for block in ("mlp", "block_sparse_moe")]
    found = {"router": router, "experts_gate_up": gate_up, "experts_down": down}
    if moe.shared_intermediate:
        found |= _mlp(spec, "shared_", f"{at}mlp.shared_experts.", moe.shared_intermediate)
    return found


def _plus_one(weight: torch.Tensor) -> torch.Tensor:
    return (weight if weight.dtype == torch.float64 else weight.float()) + 1


def _half_split(rows: torch.Tensor) -> torch.Tensor:  # [..., rope_dim, in]
    """Interleaved rotation pairs (0, 1), (2, 3) ... become (0, dim/2), (1, dim/2 + 1) ..., which the op rotates."""
    return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)


def _query_rows(mla: MLASpec, weight: torch.Tensor) -> torch.Tensor:
    """Rows of each head: [nope | rope interleaved] -> [rope half-split | nope]."""
    heads = weight.view(-1, mla.nope_dim + mla.rope_dim, weight.shape[1])
    nope, rope = heads[:, : mla.nope_dim], heads[:, mla.nope_dim :]
    return torch.cat([_half_split(rope), nope], dim=1).flatten(0, 1)


def _key_rows(mla: MLASpec, weight: torch.Tensor) -> torch.Tensor:
    """Rows [latent | rope interleaved] -> [rope half-split | latent]."""
    latent, rope = weight[: mla.kv_rank], weight[mla.kv_rank :]
    return torch.cat([_half_split(rope), latent], dim=0)


def _per_head(per_head: int, rows: slice, weight: torch.Tensor) -> torch.Tensor:
    """Rows of all heads -> [heads, some of each head's rows, in]."""
    return weight.view(-1, per_head, weight.shape[1])[:, rows]
