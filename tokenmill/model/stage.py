"""Stage: the layers that one rank of a pipeline has, and how a model's layers are divided among its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenmill.errors import ConfigError
from tokenmill.model.spec import DecoderSpec, StagePart


def stages_of(spec: DecoderSpec, count: int) -> list[DecoderSpec]:
    """The stages of a model, or of a rank's part of all its layers: layers of about equal cost. One stage is the model
    itself.
    """
    if count == 1:
        return [spec]
    if count > spec.num_layers:
        raise ConfigError(
            f"{spec.architecture} has {spec.num_layers} layers, which cannot be divided among {count} stages; "
            f"pp may be up to {spec.num_layers}"
        )
    return [stage_of(spec, layers) for layers in divide(layer_costs(spec.whole), count)]  # the same for all ranks


def stage_of(spec: DecoderSpec, layers: range) -> DecoderSpec:
    """The spec with these layers alone, which are numbered anew."""
    some = slice(layers.start, layers.stop)
    moe = None if spec.moe is None else replace(spec.moe, layers=spec.moe.layers[some])
    part = None if spec.part is None else replace(spec.part, whole=stage_of(spec.part.whole, layers))
    return replace(
        spec,
        num_layers=len(layers),
        ropes=spec.ropes[some],
        windows=spec.windows[some],
        moe=moe,
        stage=StagePart(spec, layers),
        part=part,
    )


def layer_costs(spec: DecoderSpec) -> list[float]:
    """Weights that a token is multiplied with, by layer; the last one's with the head."""
    idle = 0.0 if spec.moe is None else 1 - spec.moe.top_k / spec.moe.experts
    costs = []
    for index in range(spec.num_layers):
        params = spec.layer_parameters(index).items()
        costs.append(sum(param.numel * (1 - idle * name.startswith("experts_")) for name, param in params))
    costs[-1] += spec.vocab_size * spec.hidden
    return costs


def divide(costs: Sequence[float], count: int) -> list[range]:
    """Cut a row of layers into so many parts, each with one at least, whose largest cost is as small as can be; and of
    such cuts the one whose other parts are alike.
    """
    total = len(costs)
    sums = [sum(costs[:number]) for number in range(total + 1)]
    # best[parts][end]: (largest cost, sum of squares, where the last part begins) of the first `end` layers
    best = [[(0.0, 0.0, 0) if end == 0 else (float("inf"), 0.0, 0) for end in range(total + 1)]]
    for _ in range(count):
        before, row = best[-1], [(float("inf"), 0.0, 0)] * (total + 1)
        for end in range(1, total + 1):
            for start in range(end):
                cost = sums[end] - sums[start]
                row[end] = min(row[end], (max(before[start][0], cost), before[start][1] + cost**2, start))
        best.append(row)
    cuts, end = [], total
    for row in reversed(best[1:]):
        cuts.append(range(row[end][2], end))
        end = row[end][2]
    return cuts[::-1]
