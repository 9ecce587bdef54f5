"""The weights of a decoder as it uses them, and the store it asks for them layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F

from tokenmill.model.experts import ExpertSource
from tokenmill.model.spec import NORM_NAMES, DecoderSpec, ParamSpec
from tokenmill.quant.schemes.adapters import LowRankUpdates, RowContext, adapted
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.experts import Experts, allocate_experts
from tokenmill.quant.schemes.scheme import Linear, QuantScheme, TakesRows

Weight = torch.Tensor | Linear | Experts
Part = TypeVar("Part")


@dataclass(frozen=True)
class AttentionWeights:
    qkv: Linear  # rows: queries, keys, values
    o: Linear
    q_norm: torch.Tensor | None = None  # [head_dim] or [heads * head_dim]
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentAttentionWeights:
    qkv: Linear  # rows: queries (or their latent), rotated key, key-value latent
    o: Linear
    kv_norm: torch.Tensor  # [kv_rank]
    k_up: torch.Tensor  # [heads, nope_dim, kv_rank]
    v_up: torch.Tensor  # [heads, v_dim, kv_rank]
    q_norm: torch.Tensor | None = None  # [q_rank]
    q_up: Linear | None = None  # from the queries' latent


@dataclass(frozen=True)
class MLPWeights:
    gate_up: Linear  # rows: gate, up
    down: Linear


@dataclass(frozen=True)
class MoEWeights:
    router: torch.Tensor  # [experts, hidden], float32 or wider
    gate_up: torch.Tensor | Experts  # [experts, 2 * intermediate, hidden]
    down: torch.Tensor | Experts  # [experts, hidden, intermediate]
    shared: MLPWeights | None = None


@dataclass(frozen=True)
class LayerWeights:
    attention: AttentionWeights | LatentAttentionWeights
    mlp: MLPWeights | MoEWeights
    before_attention: torch.Tensor | None = None  # norms, [hidden]; None where the architecture has none
    after_attention: torch.Tensor | None = None
    before_mlp: torch.Tensor | None = None
    after_mlp: torch.Tensor | None = None

    def linears(self) -> list[Linear]:
        mlp = self.mlp if isinstance(self.mlp, MLPWeights) else self.mlp.shared
        found = [self.attention.qkv, self.attention.o, *([] if mlp is None else [mlp.gate_up, mlp.down])]
        q_up = self.attention.q_up if isinstance(self.attention, LatentAttentionWeights) else None
        return found if q_up is None else [*found, q_up]


def with_adapters(
    layer: LayerWeights, at: str, updates: Mapping[str, LowRankUpdates], context: RowContext
) -> LayerWeights:
    """The layer for these rows; `at`: what its canonical names begin with, under which `updates` has what is added."""

    def adapt(part: Any, prefix: str = "") -> Any:
        changes = {
            field.name: adapted(value, updates.get(at + prefix + field.name), context)
            for field in fields(part)
            if isinstance(value := getattr(part, field.name), Linear)
        }
        return replace(part, **changes)

    mlp = layer.mlp
    if isinstance(mlp, MLPWeights):
        mlp = adapt(mlp)
    elif mlp.shared is not None:
        mlp = replace(mlp, shared=adapt(mlp.shared, "shared_"))
    return replace(layer, attention=adapt(layer.attention), mlp=mlp)


class WeightStore(Protocol):
    """Where weights come from during a forward pass. A stage of a pipeline has an embedding only where tokens enter,
    and a final norm and a head only at its end; nobody asks it for others.

    `layer` is called in order, once per layer and pass, on the thread and stream that computes; what it returns
    must be usable until the next call. A store may use the call to start bringing in the layers that follow.
    """

    dtype: torch.dtype
    device: torch.device
    embed: torch.Tensor | Linear  # [vocab, hidden]
    final_norm: torch.Tensor  # [hidden]
    lm_head: Linear

    @property
    def experts(self) -> ExpertSource | None:
        """Asked for the experts that tokens chose; None: all are in their layers."""
        ...

    def layer(self, index: int) -> LayerWeights: ...

    def peek(self, index: int) -> LayerWeights:
        """The same to see what it is made of, at any time: its numbers need not be there."""
        ...

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:  # [tokens] -> [tokens, hidden]
        """Zeros for tokens that another rank has."""
        ...


class ResidentWeights:
    """Every weight on the device for the whole life of the engine."""

    experts: ExpertSource | None = None
    embed: torch.Tensor | Linear
    final_norm: torch.Tensor
    lm_head: Linear

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        dtype: torch.dtype | None = None,  # None, as the device: of the embedding, or where that is packed, of the norm
        device: torch.device | None = None,
    ) -> None:
        if "embed" in weights:
            self.embed = _embedding(weights)
        if spec.has_head:
            self.final_norm = _tensor(weights, "final_norm")
            self.lm_head = self._tied() if spec.tie_embeddings else _linear(weights, "lm_head")
        if dtype is None or device is None:
            like = self.final_norm if isinstance(self.embed, Linear) else self.embed
            dtype, device = like.dtype, like.device
        self.dtype, self.device = dtype, device
        self._vocab = None if spec.part is None else spec.part.vocab
        self._layers = [layer_weights(spec, weights, index) for index in range(spec.num_layers)]
        for linear in linears(self, spec.num_layers):
            linear.matmul(self.dtype)  # chosen now, not in a step

    def _tied(self) -> Linear:
        return self.embed if isinstance(self.embed, Linear) else Linear(Dense(), {"weight": self.embed})

    def layer(self, index: int) -> LayerWeights:
        return self._layers[index]

    def peek(self, index: int) -> LayerWeights:
        return self._layers[index]

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        first = 0 if self._vocab is None else self._vocab.start
        if isinstance(self.embed, Linear):
            scheme = cast(TakesRows, self.embed.scheme)  # no other is asked to store an embedding
            return scheme.take_rows(self.embed.storage, ids, first)
        if self._vocab is None:
            return F.embedding(ids, self.embed)
        mine = (ids >= first) & (ids < self._vocab.stop)
        return F.embedding(torch.where(mine, ids - first, 0), self.embed) * mine[:, None].to(self.embed.dtype)


def linears(weights: WeightStore, num_layers: int) -> list[Linear]:
    """Every linear layer, head included where there is one."""
    found = [one for index in range(num_layers) for one in weights.peek(index).linears()]
    head = getattr(weights, "lm_head", None)
    return found if head is None else [*found, head]


def allocate(
    spec: DecoderSpec, param: ParamSpec, dtype: torch.dtype, device: torch.device, scheme: QuantScheme
) -> Weight:
    """Uninitialized room for one parameter of `spec.parameters()`, biases included (as tensors of their own)."""
    if param.kind == "linear" or (param.kind == "embedding" and scheme.stores_embeddings):
        rows, columns = param.shape
        return Linear(scheme, scheme.allocate(rows, columns, dtype, device))
    if param.kind == "experts" and not scheme.floats:
        count, rows, columns = param.shape
        return allocate_experts(scheme, count, rows, columns, dtype, device)
    if spec.stored_wide(param.kind) and dtype != torch.float64:
        dtype = torch.float32
    return torch.empty(param.shape, dtype=dtype, device=device)


def layer_weights(spec: DecoderSpec, weights: Mapping[str, Weight], index: int) -> LayerWeights:
    """Put the parameters of one layer, found by canonical name, in the form the decoder reads."""
    at = f"layers.{index}."
    norms = {name: _tensor(weights, at + name) for name in NORM_NAMES[spec.norms]}
    attention: AttentionWeights | LatentAttentionWeights = (
        _filled(LatentAttentionWeights, weights, at) if spec.mla else _filled(AttentionWeights, weights, at)
    )
    if not spec.is_moe(index):
        return LayerWeights(attention, _filled(MLPWeights, weights, at), **norms)
    mlp = _filled(MoEWeights, weights, at, gate_up="experts_gate_up", down="experts_down")
    if at + "shared_down" in weights:
        mlp = replace(mlp, shared=_filled(MLPWeights, weights, at + "shared_"))
    return LayerWeights(attention, mlp, **norms)


def layer_kind(layer: LayerWeights | Linear) -> object:
    """Equal for layers that the same ops compute: what they are made of, in which forms, dtypes and shapes."""

    def described(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype
        if isinstance(value, Experts):
            return len(value), described(value.linear(0))
        if isinstance(value, Linear):
            parts = {name: described(one) for name, one in value.storage.items()}
            return value.scheme.name, tuple(sorted(parts.items(), key=str)), described(value.bias)
        if is_dataclass(value):
            return type(value), tuple(described(getattr(value, field.name)) for field in fields(value))
        return value

    return described(layer)


def _filled(kind: type[Part], weights: Mapping[str, Weight], at: str, **names: str) -> Part:
    """One of the classes above, from the parameters that its fields name, or `names` instead."""
    found: dict[str, Weight] = {}
    for field in fields(cast(Any, kind)):
        name = at + names.get(field.name, field.name)
        if name in weights:
            found[field.name] = _linear(weights, name) if isinstance(weights[name], Linear) else weights[name]
    return kind(**found)


def _linear(weights: Mapping[str, Weight], name: str) -> Linear:
    found = weights[name]
    assert isinstance(found, Linear)
    return Linear(found.scheme, found.storage, _maybe(weights, name + ".bias"))


def _embedding(weights: Mapping[str, Weight]) -> torch.Tensor | Linear:
    found = weights["embed"]
    assert not isinstance(found, Experts)
    return found


def _tensor(weights: Mapping[str, Weight], name: str) -> torch.Tensor:
    found = weights[name]
    assert isinstance(found, torch.Tensor)
    return found


def _maybe(weights: Mapping[str, Weight], name: str) -> torch.Tensor | None:
    return _tensor(weights, name) if name in weights else None
