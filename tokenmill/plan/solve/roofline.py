"""Roofline: how long a step takes, from the bytes it reads, the operations it does and what launching costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from tokenmill.plan.solve.offload import MOST
from tokenmill.plan.solve.shape import ONE_GPU, ModelShape, Split
from tokenmill.step_time import Facts

# How reading and computing overlap within a product: the p-norm of both times. Infinity would be a perfect roofline,
# 1 none at all; tiles wait for their first bytes and end together, so it lies between.
SHARPNESS = 2.0


@dataclass(frozen=True)
class Rates:
    """What a machine reaches with this engine at one form of weights. All are above zero."""

    weight_bytes: float  # per second, weights
    kv_bytes: float  # per second, keys and values of decoding rows
    linear_flops: float  # per second, products of many rows
    stacked_flops: float  # per second, products of experts and of latent attention
    attention_flops: float  # per second, attention of chunks
    traffic_bytes: float  # per second, activations between products
    logit_s: float  # seconds per sampled logit
    row_s: float  # seconds per row of a step
    step_s: float  # seconds per step
    layer_s: float  # seconds per layer of a step: kernels that follow one another
    eager_s: float  # seconds per layer that the host needs to launch a step that is not recorded
    overlapped: bool  # the host launches while the device computes


RATE_NAMES = tuple(field.name for field in fields(Rates) if field.name != "overlapped")


@dataclass(frozen=True)
class ElementBytes:
    """How numbers are stored, in bytes."""

    weight: float  # per parameter of linear layers, scales included
    other: float  # per parameter of everything else, and of experts where nothing else is said: embedding
    kv: float  # per cached element, scales included
    activation: float = 2.0  # per element between products
    rounded_head: float | None = None  # per parameter of the head, scales included; None: like everything else
    rounded_experts: float | None = None  # the same of routed experts

    @property
    def head(self) -> float:
        return self.other if self.rounded_head is None else self.rounded_head

    @property
    def experts(self) -> float:
        return self.other if self.rounded_experts is None else self.rounded_experts


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of one copy."""

    bytes_per_s: float  # in one direction, per GPU
    latency_s: float  # of one exchange


@dataclass(frozen=True)
class Stream:
    """Weights that every step brings to the device, while it computes with others; or experts, of which it brings those
    that it chooses. It waits for these, unless it chooses most: then those of the next layer come meanwhile.
    """

    nbytes: int  # of all that is not there
    bytes_per_s: float
    by_expert: bool = False

    @property
    def seconds(self) -> float:
        return self.nbytes / self.bytes_per_s

    def step(self, computed: float, chosen: float) -> float:
        """Seconds of a step that computes so long; chosen: which share of its layers' experts."""
        if not self.by_expert:
            return max(computed, self.seconds)
        moved = self.seconds * chosen
        return max(computed, moved) if chosen >= MOST else computed + moved


def facts_for(
    shape: ModelShape,
    decodes: Iterable[int] = (),  # tokens that each decoding row attends to, its own included
    chunks: Sequence[tuple[int, int, int]] = (),  # (first position, tokens, positions sampled)
) -> Facts:
    """Of a step with such rows; what a layer's window hides does not count."""
    contexts = list(decodes)
    keys = float(sum(contexts)) if shape.windows == ((None, shape.layers),) else sum(map(shape.keys, contexts))
    return Facts(
        decode_rows=len(contexts),
        decode_context=keys,
        prefill_tokens=sum(count for _, count, _ in chunks),
        prefill_pairs=sum(shape.pairs(start, count) for start, count, _ in chunks),
        prefill_context=sum(shape.keys(start + count) for start, count, _ in chunks),
        chunks=len(chunks),
        sampled=len(contexts) + sum(samples for _, _, samples in chunks),
    )


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step of one copy of a model. `split` says over how many GPUs the copy is divided."""

    shape: ModelShape
    element_bytes: ElementBytes
    rates: Rates
    split: Split = ONE_GPU
    link: Link | None = None
    stream: Stream | None = None

    def seconds(self, facts: Facts) -> float:
        """From launch to tokens, all stages of a pipeline one after another."""
        if facts.tokens == 0:
            return 0.0
        rates, shape, ranks = self.rates, self.shape, self.split.tensor * self.split.expert
        device = self._products(facts) + self._attention(facts) + self._exchanges(facts)
        device += facts.tokens * shape.traffic * self.element_bytes.activation / rates.traffic_bytes / ranks
        device += facts.sampled * shape.vocab * rates.logit_s / ranks
        device += rates.step_s + shape.layers * rates.layer_s + (facts.decode_rows + facts.chunks) * rates.row_s
        host = shape.layers * rates.eager_s if facts.chunks else 0.0
        computed = max(device, host) if rates.overlapped else device + host
        if self.stream is None:
            return computed
        return self.stream.step(computed, shape.experts_read(facts.tokens) / max(1, shape.expert_weights))

    def _products(self, facts: Facts) -> float:
        """Ranks of an expert split read every other weight for their own share of the rows."""
        shape, element_bytes, rates, ranks = self.shape, self.element_bytes, self.rates, self.split.tensor
        every = ranks * self.split.expert
        read = (shape.linear * element_bytes.weight + shape.stacked * element_bytes.other) / ranks
        read += shape.experts_read(facts.tokens) * element_bytes.experts / every
        products = shape.linear / rates.linear_flops + (shape.active - shape.linear) / rates.stacked_flops
        seconds = _either(read / rates.weight_bytes, 2.0 * facts.tokens * products / every)
        if facts.sampled:
            head = shape.head * element_bytes.head / ranks / rates.weight_bytes
            seconds += _either(head, 2.0 * facts.sampled * shape.head / every / rates.linear_flops)
        return seconds

    def _attention(self, facts: Facts) -> float:
        shape, rates = self.shape, self.rates
        key = shape.kv_elements * self.element_bytes.kv * shape.kv_share(self.split.tensor) / self.split.expert
        seconds = facts.decode_context * key / rates.kv_bytes
        if facts.chunks:
            flops = facts.prefill_pairs * shape.pair_flops / (self.split.tensor * self.split.expert)
            seconds += _either(facts.prefill_context * key / rates.kv_bytes, flops / rates.attention_flops)
        return seconds

    def _exchanges(self, facts: Facts) -> float:
        """Two sums per layer between tensor ranks, two shuffles per mixture, one hand-over per stage."""
        split, shape, link = self.split, self.shape, self.link
        if split.gpus == 1 or link is None:
            return 0.0
        rows = facts.tokens * shape.hidden * self.element_bytes.activation
        seconds = 0.0
        if split.tensor > 1:
            share = 2 * (split.tensor - 1) / split.tensor
            seconds += 2 * shape.layers * (link.latency_s + share * rows / link.bytes_per_s)
        if split.expert > 1:
            away = rows * shape.top_k * (split.expert - 1) / split.expert**2
            seconds += 2 * shape.moe_layers * (link.latency_s + away / link.bytes_per_s)
        return seconds + (split.pipeline - 1) * (link.latency_s + rows / link.bytes_per_s)


def _either(first: float, second: float) -> float:
    """The time of two things that overlap, though not perfectly."""
    return (first**SHARPNESS + second**SHARPNESS) ** (1 / SHARPNESS)  # type: ignore[no-any-return]
