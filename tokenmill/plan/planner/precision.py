"""Precisions that a plan may choose: bytes of a weight and of a cached element, and how far from the model as saved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.model.spec import DecoderSpec
from tokenmill.plan.solve.memory import ModelBytes, guard_bytes
from tokenmill.plan.solve.roofline import ElementBytes
from tokenmill.plan.solve.shape import ModelShape, Split
from tokenmill.quant.forms import Layout, WeightForm

if TYPE_CHECKING:
    import torch

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUALITIES = ("exact", "near", "any")
HEAD = "lm_head"


@dataclass(frozen=True)
class WeightPrecision:
    """A form of linear layers and experts. The embedding stays as the model was saved, and so does the head, if the
    checkpoint does not store it otherwise.
    """

    quantization: str | None  # the engine's setting
    efficiency: str  # the key in `gpus.EFFICIENCIES`
    weight_bytes: float | None  # per parameter; None: as the model computes
    loss: int  # rank of what it costs in quality: 0 nothing, 1 hard to measure, 2 measurable
    stored: str = ""  # the form in which the checkpoint has them, if it is quantized: the engine keeps it, unasked
    widest: int = 0  # weights of the largest matrix that is stored so
    head_bytes: float | None = None  # per parameter of the head; None: as the model computes
    expert_bytes: float | None = None  # per parameter of experts that a checkpoint stores; None: as the model computes

    @property
    def name(self) -> str:
        return self.quantization or self.stored or "as saved"


@dataclass(frozen=True)
class KVPrecision:
    dtype: str  # the engine's `kv_cache_dtype`
    element_bytes: float | None  # None: as the model computes
    scale_bytes: int  # per token and head, for keys and for values
    loss: int


WEIGHT_PRECISIONS = (
    WeightPrecision(None, "dense", None, 0),
    WeightPrecision("fp8", "fp8", 1.0, 1),
    WeightPrecision("int8", "int8", 1.0, 1),
    WeightPrecision("w8a8", "w8a8", 1.0, 2),
    WeightPrecision("int4", "int4", 0.5 + 2 / 128, 2),
)
KV_PRECISIONS = (KVPrecision("auto", None, 0, 0), KVPrecision("fp8", 1.0, 2, 1))


def allowed_loss(quality: str) -> int:
    return QUALITIES.index(quality)


def element_bytes_of(weights: WeightPrecision, kv: KVPrecision, itemsize: int, head_dim: int) -> ElementBytes:
    return ElementBytes(
        weight=weights.weight_bytes or itemsize,
        other=itemsize,
        kv=itemsize if kv.element_bytes is None else kv.element_bytes + kv.scale_bytes / head_dim,
        activation=itemsize,
        rounded_head=weights.head_bytes,
        rounded_experts=weights.expert_bytes if weights.stored else weights.weight_bytes,
    )


def guard_of(shape: ModelShape, split: Split) -> int:
    """Bytes of the weights that a rank of a narrow model holds in float32 while it computes in float32."""
    experts = shape.expert_weights / split.expert / max(shape.moe_layers, 1)
    stacked = (shape.stacked / shape.layers + experts) / split.tensor
    return guard_bytes(shape.head, int(stacked) + 1, -(-shape.small // (shape.moe_layers or shape.layers)))


def rank_bytes(shape: ModelShape, element_bytes: ElementBytes, split: Split, itemsize: int) -> ModelBytes:
    """The model as the memory plan of the fullest rank sees it."""
    layers = -(-shape.layers // split.pipeline) / shape.layers
    linear = shape.linear / split.tensor * element_bytes.weight
    stacked = shape.stacked / split.tensor * element_bytes.other
    stacked += shape.expert_weights / split.expert / split.tensor * element_bytes.experts
    ends = shape.head * element_bytes.head, shape.embedding * element_bytes.other
    outer = (sum(ends) if split.pipeline == 1 else max(ends)) / split.tensor
    weights = layers * (linear + stacked + shape.small * max(itemsize, 4)) + outer
    stream = 4 * shape.hidden  # every tensor rank has the whole of it
    inner = (shape.activation - stream) / split.tensor
    # A rank's inputs of quantized products are copied, a byte each.
    copies = shape.activation - stream if element_bytes.weight < itemsize else 0
    guard = guard_of(shape, split) if itemsize < 4 else 0
    return ModelBytes(
        weights=int(weights) + 1,
        kv_per_token=int(shape.kv_elements * element_bytes.kv * shape.kv_share(split.tensor) * layers) + 1,
        activation_per_token=int((stream + inner) * itemsize + copies / split.tensor) + 1,
        logits_per_row=shape.vocab * (itemsize + max(4, itemsize)),
        vocab=shape.vocab,
        rope_per_position=4 * shape.rope_dims,
        flops_per_token=2.0 * shape.active,
        guard=guard,
        guard_per_token=int((stream + inner) * (4 - itemsize)) + 1 if guard else 0,
        layers=(int((weights - outer) / shape.layers),) * shape.layers if split.gpus == 1 else (),
        expert_bytes=_expert_bytes(shape, element_bytes) if split.gpus == 1 else (),
        experts=shape.experts,
    )


def _expert_bytes(shape: ModelShape, element_bytes: ElementBytes) -> tuple[int, ...]:
    if not shape.experts:
        return ()
    return (int(shape.expert_weights * element_bytes.experts / shape.moe_layers / shape.experts),) * shape.moe_layers


def stored_precision(spec: DecoderSpec, stored: Mapping[str, WeightForm], dtype: torch.dtype) -> WeightPrecision | None:
    """What a quantized checkpoint stores, for which no other form is planned; None: all are floats.

    The mean over the linear layers, and over the experts, with the rates of the form that most weights have.
    The head is counted apart: it is read for sampled rows only.
    """
    import torch  # the rest of planning does without

    from tokenmill.engine.choices import linear_shapes, matrix_shapes
    from tokenmill.quant.schemes.choose import ComputeTarget, choose_schemes

    shapes = matrix_shapes(spec)
    experts = shapes.keys() - linear_shapes(spec).keys()
    kept = {name: form for name, form in stored.items() if name in shapes}
    if not kept:
        return None
    schemes = choose_schemes(Layout(), shapes, kept, False, ComputeTarget(torch.device("cuda"), dtype), experts)

    def mean_bytes(names: Iterable[str]) -> float:
        some = [(schemes.of(name).nbytes(*shapes[name], dtype), math.prod(shapes[name])) for name in names]
        return sum(held for held, _ in some) / sum(count for _, count in some)

    weights: Counter[WeightForm] = Counter()
    for name, form in kept.items():
        weights[form] += math.prod(shapes[name]) * (spec.expert_count if name in experts else 1)
    most = weights.most_common(1)[0][0]
    by_row = most.group is None and most.kind in ("fp8", "w8a8")  # their inputs are rounded, too
    efficiency = most.kind if by_row or most.kind == "int4" else "int8"
    return WeightPrecision(
        None,
        efficiency,
        mean_bytes(shapes.keys() - {HEAD} - experts),
        0,
        stored=", ".join(form.name for form, _ in weights.most_common()),
        widest=max(math.prod(shapes[name]) for name in kept),
        head_bytes=mean_bytes([HEAD]) if HEAD in kept else None,
        expert_bytes=mean_bytes(experts) if experts & kept.keys() else None,
    )
