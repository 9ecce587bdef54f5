"""ModelShape: a model as counts of parameters, cached elements and operations; Split: how it is divided over GPUs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tokenmill.model.spec import DecoderSpec
from tokenmill.parallel.layout import Layout


@dataclass(frozen=True)
class Split:
    tensor: int = 1  # every layer's matrices and heads
    pipeline: int = 1  # layers, in stages
    expert: int = 1  # experts, over ranks that otherwise hold copies of everything else

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.expert

    @property
    def name(self) -> str:
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}", f"EP{self.expert}"]
        return " x ".join(part for part in parts if not part.endswith("P1")) or "undivided"

    @property
    def layout(self) -> Layout:
        """The same in ranks: those that share the experts have requests of their own."""
        experts = self.tensor * self.expert if self.expert > 1 else 1
        return Layout(tp=self.tensor, pp=self.pipeline, dp=self.expert, ep=experts)


ONE_GPU = Split()
MOST_TENSOR = 8  # ranks that heads are divided among
ONE = frozenset([1])


@dataclass(frozen=True)
class ModelShape:
    """Counts over all layers."""

    name: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    linear: int  # parameters of linear layers that every token is multiplied with, the head not included
    head: int  # parameters of the head, tied or not
    embedding: int  # parameters of the embedding; 0 where the head is the same matrix
    small: int  # norms, biases and routers
    stacked: int  # parameters of latent attention's per-head products
    expert_weights: int  # parameters of all routed experts
    experts: int  # per layer; 0: none
    top_k: int
    moe_layers: int
    kv_elements: int  # cached per token
    pair_flops: float  # of one query meeting one key, over all heads and layers
    traffic: int  # elements per token that norms, activations and the like read and write
    activation: int  # elements alive at once per token, as the memory plan bounds them
    windows: tuple[tuple[int | None, int], ...]  # (visible positions or None, layers like that)
    max_positions: int
    rope_dims: int  # of different rotary tables
    saved_dtype: str | None
    tensors: frozenset[int] = ONE  # numbers of ranks that can divide heads and columns, every expert included
    tensors_beside_experts: frozenset[int] = ONE  # and where whole experts are divided

    @property
    def parameters(self) -> int:
        return self.linear + self.head + self.embedding + self.small + self.stacked + self.expert_weights

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with, the head not included."""
        chosen = self.expert_weights * self.top_k // self.experts if self.experts else 0
        return self.linear + self.stacked + chosen

    def experts_read(self, tokens: float) -> float:
        """Parameters of the experts that so many tokens choose, if they choose at random."""
        if not self.experts:
            return 0.0
        untouched: float = (1 - self.top_k / self.experts) ** tokens
        return self.expert_weights * (1 - untouched)

    def kv_share(self, tensor: int) -> float:
        """The share of a token's cache that a rank holds: heads are divided as far as there are heads."""
        return -(-self.kv_heads // tensor) / self.kv_heads

    def keys(self, context: int) -> float:
        """Keys that a query at this position sees, averaged over the layers."""
        if len(self.windows) == 1 and self.windows[0][0] is None:
            return context
        return sum(min(context, window or context) * layers for window, layers in self.windows) / self.layers

    def pairs(self, start: int, count: int) -> float:
        """Pairs of query and key of a chunk of a prompt, averaged over the layers."""
        return sum(_pairs(start, count, window) * layers for window, layers in self.windows) / self.layers


def shape_of(spec: DecoderSpec, name: str = "") -> ModelShape:
    parameters = spec.parameters()

    def count(kind: str) -> int:
        return sum(one.numel for one in parameters.values() if one.kind == kind)

    head = spec.vocab_size * spec.hidden
    experts = count("experts")
    moe = spec.moe
    widths = spec.kv_shapes[0]
    value_dim = widths.v_dim or (spec.mla.kv_rank if spec.mla else 0)
    inner = spec.intermediate if moe is None else moe.top_k * moe.intermediate + moe.shared_intermediate
    return ModelShape(
        name=name or spec.architecture,
        layers=spec.num_layers,
        hidden=spec.hidden,
        vocab=spec.vocab_size,
        heads=spec.heads,
        kv_heads=widths.kv_heads,
        linear=count("linear") - (0 if spec.tie_embeddings else head),
        head=head,
        embedding=0 if spec.tie_embeddings else head,
        small=count("norm") + count("bias") + count("router"),
        stacked=count("stacked"),
        expert_weights=experts,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        moe_layers=sum(moe.layers) if moe else 0,
        kv_elements=spec.kv_bytes_per_token(1),
        pair_flops=2.0 * spec.heads * (widths.k_dim + value_dim) * spec.num_layers,
        traffic=spec.num_layers * (10 * spec.hidden + 2 * spec.qkv_size + 3 * inner),
        activation=spec.activation_elements,
        windows=tuple(sorted(Counter(spec.windows).items(), key=lambda one: one[0] or 0)),
        max_positions=spec.max_positions,
        rope_dims=sum(rope.dim for rope in set(spec.ropes)),
        saved_dtype=spec.dtype,
        tensors=_divisors(spec, whole_experts=False),
        tensors_beside_experts=_divisors(spec, whole_experts=True),
    )


def _divisors(spec: DecoderSpec, whole_experts: bool) -> frozenset[int]:
    return frozenset(size for size in range(1, MOST_TENSOR + 1) if not spec.uneven(size, whole_experts))


def _pairs(start: int, count: int, window: int | None) -> float:
    """Sum over the chunk's positions p of min(p + 1, window)."""
    end = start + count
    if window is None or end <= window:
        return (start + 1 + end) * count / 2
    full = min(count, end - max(window, start))  # positions that see a whole window
    rest = count - full
    return (start + 1 + start + rest) * rest / 2 + full * window
