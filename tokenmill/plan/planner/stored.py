"""What a quantized checkpoint stores, as a form that plans can count with: no other is planned for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tokenmill.model.spec import DecoderSpec
from tokenmill.plan.planner.precision import WeightPrecision
from tokenmill.quant.forms import Layout, WeightForm

if TYPE_CHECKING:
    import torch

# Bytes per weight that a GPU without kernels for them moves to widen it for a product, in plain torch. Counted over
# the operations (quant/schemes/weight_only.py, quant/schemes/row_scaled.py), not measured.
WIDENING = {"int4": 48.0, "int8": 38.0}
WIDENING_BYTES = 21.0  # of codes of one byte with a scale per row
HEAD = "lm_head"


def stored_precision(spec: DecoderSpec, stored: Mapping[str, WeightForm], dtype: torch.dtype) -> WeightPrecision | None:
    """The mean over the linear layers, with the rates of the form that most weights have; None: all are floats.

    The head is counted apart: it is read for sampled rows only.
    """
    import torch  # the rest of planning does without

    from tokenmill.engine.choices import linear_shapes
    from tokenmill.quant.schemes.choose import ComputeTarget, choose_schemes

    shapes = linear_shapes(spec)
    kept = {name: form for name, form in stored.items() if name in shapes}
    if not kept:
        return None
    schemes = choose_schemes(Layout(), shapes, kept, False, ComputeTarget(torch.device("cuda"), dtype))

    def mean_bytes(names: Iterable[str]) -> float:
        some = [(schemes.of(name).nbytes(*shapes[name], dtype), math.prod(shapes[name])) for name in names]
        return sum(held for held, _ in some) / sum(count for _, count in some)

    weights: Counter[WeightForm] = Counter()
    for name, form in kept.items():
        weights[form] += math.prod(shapes[name])
    most = weights.most_common(1)[0][0]
    by_row = most.group is None and most.kind in ("fp8", "w8a8")  # their inputs are rounded, too
    efficiency = most.kind if by_row or most.kind == "int4" else "int8"
    return WeightPrecision(
        None,
        efficiency,
        mean_bytes(shapes.keys() - {HEAD}),
        0,
        stored=", ".join(form.name for form, _ in weights.most_common()),
        widest=max(math.prod(shapes[name]) for name in kept),
        widening=WIDENING_BYTES if by_row else WIDENING[efficiency],
        head_bytes=mean_bytes([HEAD]) if HEAD in kept else None,
    )
