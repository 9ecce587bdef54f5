"""Shard: who a rank is among those that divide a model's layers, and what of every parameter it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenmill.errors import ConfigError
from tokenmill.model.experts import shares_of_experts
from tokenmill.model.spec import DecoderSpec, RankPart
from tokenmill.parallel.layout import Layout

Held = Mapping[int, tuple[range, ...]]  # dimension -> what of it is held, in this order; others are held whole

_ROUND = 64  # tokens: vocabularies of any size are cut where matrices have whole tiles


@dataclass(frozen=True)
class Shard:
    """Heads, columns and the vocabulary are divided by `size`, and every expert too, or whole ones by `expert_size`."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1  # 1: every expert is cut as a dense MLP is


def shard_of(layout: Layout, rank: int) -> Shard:
    """Of one of all ranks."""
    _, data, tensor = layout.coordinates(rank)
    return Shard(tensor, layout.tp, data * layout.tp + tensor if layout.ep > 1 else 0, layout.ep)


def spec_of(spec: DecoderSpec, shard: Shard, hot_experts: tuple[int, ...] = ()) -> DecoderSpec:
    """The part of the model that a rank computes. hot_experts: those that every rank has, where whole ones are
    divided.
    """
    if shard.size == shard.expert_size == 1:
        return spec
    check(spec, shard)
    moe, experts = spec.moe, None
    if moe is not None and shard.expert_size > 1:
        wrong = next((one for one in hot_experts if not 0 <= one < moe.experts), None)
        if wrong is not None:
            raise ConfigError(f"hot_experts names expert {wrong}, and {spec.architecture} has 0 to {moe.experts - 1}")
        experts = shares_of_experts(moe.experts, shard.expert_size, hot_experts)[shard.expert_rank]
    if moe is not None:
        inner = moe.intermediate if experts is not None else moe.intermediate // shard.size
        moe = replace(moe, intermediate=inner, shared_intermediate=moe.shared_intermediate // shard.size)
    vocab = vocabulary(spec.vocab_size, shard.rank, shard.size)
    divided = (experts, shard.expert_rank, shard.expert_size, hot_experts) if experts is not None else ()
    return replace(
        spec,
        heads=spec.heads // shard.size,
        kv_heads=max(1, spec.kv_heads // shard.size),
        intermediate=spec.intermediate // shard.size,
        moe=moe,
        part=RankPart(spec, shard.rank, shard.size, vocab, *divided),
    )


def vocabulary(size: int, rank: int, ranks: int) -> range:
    """The tokens whose embeddings and logits a rank has."""
    unit = _ROUND if size >= 8 * _ROUND * ranks else 1
    first, last = (size if at == ranks else size * at // ranks // unit * unit for at in (rank, rank + 1))
    return range(first, last)


def held(spec: DecoderSpec) -> dict[str, Held]:
    """What a rank holds of every parameter of the whole model, by canonical name."""
    part = spec.part
    if part is None:
        return {name: {} for name in spec.parameters()}
    vocab: Held = {0: (part.vocab,)}
    found = {name: vocab if name in ("embed", "lm_head") else {} for name in spec.parameters()}
    for index in range(spec.num_layers):
        layer = _attention(spec, part) | _mlp(spec, part, index)
        found |= {name: layer[rest] for name in found if (rest := name.removeprefix(f"layers.{index}.")) in layer}
    return found


def adds_bias(spec: DecoderSpec, name: str) -> bool:
    """Whether this rank adds the bias: one of sums over ranks is added by the first."""
    return spec.part is None or spec.part.rank == 0 or not name.endswith(("o.bias", "down.bias"))


def _attention(spec: DecoderSpec, part: RankPart) -> dict[str, Held]:
    whole = part.whole
    heads = range(part.rank * spec.heads, (part.rank + 1) * spec.heads)
    if spec.mla is not None:
        width = spec.mla.nope_dim + spec.mla.rope_dim
        queries, latent = _times(heads, width), range(whole.q_size, whole.qkv_size)
        return {
            "qkv": {} if spec.mla.q_rank is not None else {0: (queries, latent)},
            "q_up": {0: (queries,)},
            "k_up": {0: (heads,)},
            "v_up": {0: (heads,)},
            "o": {1: (_times(heads, spec.mla.v_dim),)},
        }
    first = part.rank * whole.kv_heads // part.ranks  # fewer than ranks: several hold the same
    keys = _times(range(first, first + spec.kv_heads), spec.head_dim)
    rows = (_times(heads, spec.head_dim), _after(whole.q_size, keys), _after(whole.q_size + whole.kv_size, keys))
    return {"qkv": {0: rows}, "qkv.bias": {0: rows}, "o": {1: (rows[0],)}}


def _mlp(spec: DecoderSpec, part: RankPart, index: int) -> dict[str, Held]:
    if spec.moe is None or not spec.moe.layers[index]:
        return _dense("", spec.intermediate, part)
    found = _dense("shared_", spec.moe.shared_intermediate, part)
    if part.experts is not None:
        mine: Held = {0: tuple(range(expert, expert + 1) for expert in part.experts)}
        return found | {"experts_gate_up": mine, "experts_down": mine}
    inner = spec.moe.intermediate
    mine_of_each = range(part.rank * inner, (part.rank + 1) * inner)
    both = (mine_of_each, _after(inner * part.ranks, mine_of_each))
    return found | {"experts_gate_up": {1: both}, "experts_down": {2: (mine_of_each,)}}


def _dense(prefix: str, inner: int, part: RankPart) -> dict[str, Held]:
    gate = range(part.rank * inner, (part.rank + 1) * inner)
    both: Held = {0: (gate, _after(inner * part.ranks, gate))}
    return {f"{prefix}gate_up": both, f"{prefix}gate_up.bias": both, f"{prefix}down": {1: (gate,)}}


def _times(units: range, size: int) -> range:
    return range(units.start * size, units.stop * size)


def _after(start: int, span: range) -> range:
    return range(start + span.start, start + span.stop)


def check(spec: DecoderSpec, shard: Shard) -> None:
    """Refuse a number of ranks that a model cannot be divided by."""
    ways = [size for size in range(1, spec.heads + 1) if not spec.uneven(size, shard.expert_size > 1)]
    if reason := spec.uneven(shard.size, shard.expert_size > 1):
        raise ConfigError(
            f"{spec.architecture} cannot be divided among {shard.size} tensor-parallel ranks: {reason}; "
            f"tp may be {', '.join(map(str, ways))}"
        )
    if shard.expert_size == 1:
        return
    if spec.moe is None:
        raise ConfigError(f"{spec.architecture} has no experts to divide among {shard.expert_size} ranks; leave ep out")
    if spec.moe.experts % shard.expert_size:
        fitting = [size for size in range(1, spec.moe.experts + 1) if spec.moe.experts % size == 0]
        raise ConfigError(
            f"{spec.architecture} cannot divide its {spec.moe.experts} experts among {shard.expert_size} ranks; ep may "
            f"be {', '.join(map(str, fitting))}"
        )
