"""The cost model: how long a step takes, from the bytes it reads, the operations it does and what launching costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from tokenmill.plan.solve.shape import ONE_GPU, ModelShape, Split

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

    def scaled(self, **factors: float) -> Rates:
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})


RATE_NAMES = tuple(field.name for field in fields(Rates) if field.name != "overlapped")


@dataclass(frozen=True)
class Form:
    """How numbers are stored, in bytes."""

    weight: float  # per parameter of linear layers, scales included
    other: float  # per parameter of everything else: experts, embedding
    kv: float  # per cached element, scales included
    activation: float = 2.0  # per element between products
    rounded_head: float | None = None  # per parameter of the head, scales included; None: like everything else

    @property
    def head(self) -> float:
        return self.other if self.rounded_head is None else self.rounded_head


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of one copy."""

    bytes_per_s: float  # in one direction, per GPU
    latency_s: float  # of one exchange


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step does, as sums over its rows. Keys and pairs are averages over the layers."""

    decodes: float = 0  # rows that decode one token; a mean over many steps need not be whole
    decode_keys: float = 0.0  # keys that they read
    prefill_tokens: float = 0
    prefill_pairs: float = 0.0  # pairs of query and key
    prefill_keys: float = 0.0  # keys that the chunks read
    chunks: int = 0
    sampled: float = 0  # rows of logits

    @property
    def tokens(self) -> float:
        return self.decodes + self.prefill_tokens


class StepLike(Protocol):
    """What the cost model reads of an engine's step; `tokenmill.engine.step.Step` is one."""

    starts: list[int]
    counts: list[int]
    samples: list[int]
    num_singles: int
    # `shared` may be there as well: a beginning of `tokens` tokens that `members` rows read once.


def step_load(
    shape: ModelShape,
    decodes: Iterable[int] = (),  # keys that each decoding row sees, its own included
    chunks: Sequence[tuple[int, int, int]] = (),  # (first position, tokens, positions sampled)
) -> StepLoad:
    contexts = list(decodes)
    keys = float(sum(contexts)) if shape.windows == ((None, shape.layers),) else sum(map(shape.keys, contexts))
    return StepLoad(
        decodes=len(contexts),
        decode_keys=keys,
        prefill_tokens=sum(count for _, count, _ in chunks),
        prefill_pairs=sum(shape.pairs(start, count) for start, count, _ in chunks),
        prefill_keys=sum(shape.keys(start + count) for start, count, _ in chunks),
        chunks=len(chunks),
        sampled=len(contexts) + sum(samples for _, _, samples in chunks),
    )


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step of one copy of a model. `split` says over how many GPUs the copy is divided."""

    shape: ModelShape
    form: Form
    rates: Rates
    split: Split = ONE_GPU
    link: Link | None = None

    def of_step(self, step: StepLike) -> float:
        """Seconds of an engine's step."""
        singles = step.num_singles
        decodes = [start + 1 for start in step.starts[:singles]]
        chunks = list(zip(step.starts[singles:], step.counts[singles:], step.samples[singles:]))
        load = step_load(self.shape, decodes, chunks)
        shared = getattr(step, "shared", None)
        if shared is not None:
            saved = (len(shared.members) - 1) * self.shape.keys(shared.tokens)
            load = replace(load, decode_keys=max(load.decode_keys - saved, 0.0))
        return self.seconds(load)

    def seconds(self, load: StepLoad) -> float:
        """From launch to tokens, all stages of a pipeline one after another."""
        if load.tokens == 0:
            return 0.0
        rates, shape, ranks = self.rates, self.shape, self.split.tensor * self.split.expert
        device = self._products(load) + self._attention(load) + self._exchanges(load)
        device += load.tokens * shape.traffic * self.form.activation / rates.traffic_bytes / ranks
        device += load.sampled * shape.vocab * rates.logit_s / ranks
        device += rates.step_s + shape.layers * rates.layer_s + (load.decodes + load.chunks) * rates.row_s
        host = shape.layers * rates.eager_s if load.chunks else 0.0
        return max(device, host) if rates.overlapped else device + host

    def stage_seconds(self, load: StepLoad) -> float:
        """How often a step can be started: one stage of a pipeline, as the others work on other requests."""
        return self.seconds(load) / self.split.pipeline

    def _products(self, load: StepLoad) -> float:
        """Ranks of an expert split read every other weight for their own share of the rows."""
        shape, form, rates, ranks = self.shape, self.form, self.rates, self.split.tensor
        every = ranks * self.split.expert
        read = (shape.linear * form.weight + shape.stacked * form.other) / ranks
        read += shape.experts_read(load.tokens) * form.other / every
        products = shape.linear / rates.linear_flops + (shape.active - shape.linear) / rates.stacked_flops
        seconds = _either(read / rates.weight_bytes, 2.0 * load.tokens * products / every)
        if load.sampled:
            head = shape.head * form.head / ranks / rates.weight_bytes
            seconds += _either(head, 2.0 * load.sampled * shape.head / every / rates.linear_flops)
        return seconds

    def _attention(self, load: StepLoad) -> float:
        shape, rates = self.shape, self.rates
        key = shape.kv_elements * self.form.kv * shape.kv_share(self.split.tensor) / self.split.expert
        seconds = load.decode_keys * key / rates.kv_bytes
        if load.chunks:
            flops = load.prefill_pairs * shape.pair_flops / (self.split.tensor * self.split.expert)
            seconds += _either(load.prefill_keys * key / rates.kv_bytes, flops / rates.attention_flops)
        return seconds

    def _exchanges(self, load: StepLoad) -> float:
        """Two sums per layer between tensor ranks, two shuffles per mixture, one hand-over per stage."""
        split, shape, link = self.split, self.shape, self.link
        if split.gpus == 1 or link is None:
            return 0.0
        rows = load.tokens * shape.hidden * self.form.activation
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


@dataclass(frozen=True)
class SummedCost:
    """The same for who has only sums over a step's rows: the simulator (`step_cost.StepCost`)."""

    model: CostModel

    def seconds(self, decode_rows: int, decode_context: int, prefill_tokens: int, prefill_attended: int) -> float:
        deepest = prefill_attended / prefill_tokens + prefill_tokens / 2 if prefill_tokens else 0.0
        return self.model.seconds(
            StepLoad(
                decodes=decode_rows,
                decode_keys=decode_context,
                prefill_tokens=prefill_tokens,
                prefill_pairs=prefill_attended,
                prefill_keys=deepest,  # as if it were one chunk
                chunks=int(prefill_tokens > 0),
                sampled=decode_rows + int(prefill_tokens > 0),
            )
        )
