"""Random weights of a given architecture, made on the device itself: a model of any size from its config alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tokenmill.model.layers import ResidentWeights, Weight, WeightStore, allocate
from tokenmill.model.shard import Held, adds_bias, held
from tokenmill.model.spec import DecoderSpec, ParamSpec
from tokenmill.model.weights.cuts import write_columns
from tokenmill.quant.forms import FLOATS
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.experts import Experts
from tokenmill.quant.schemes.packed import float_bytes
from tokenmill.quant.schemes.scheme import Linear, Schemes

_CHUNK = 1 << 25  # elements made at once, so that nothing but the weights themselves needs room


def dummy_weights(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    schemes: Schemes | None = None,
    progress: Callable[[int, int], None] | None = None,  # called with (parameters done, parameters in all)
) -> WeightStore:
    """The same seed gives the same weights on the same kind of device, each independent of the others, and a rank its
    part of these.
    """
    weights = dict(draw_parameters(spec, dtype, device, seed, schemes, progress))
    return ResidentWeights(spec, weights, dtype, torch.device(device))


def draw_parameters(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    schemes: Schemes | None = None,
    progress: Callable[[int, int], None] | None = None,
    wanted: Callable[[str], bool] = lambda name: True,  # by canonical name
) -> Iterator[tuple[str, Weight]]:
    """One parameter after the other, in the order of the layers; nobody but the caller keeps them."""
    place, schemes = torch.device(device), schemes or Schemes(Dense())
    generator = torch.Generator(place)
    whole, parts, done = spec.whole.parameters(), held(spec), 0
    params = {name: param for name, param in spec.parameters().items() if wanted(name)}
    total = sum(param.numel for param in params.values())
    for name, param in params.items():
        # 32 bits, since torch's CPU generator ignores the rest.
        drawn = name if spec.stage is None else spec.stage.name_in_model(name)
        generator.manual_seed(zlib.crc32(f"{seed} {drawn}".encode()))
        weight = allocate(spec, param, dtype, place, schemes.of(name))
        if parts[name]:
            _fill_part(weight, whole[name], parts[name], dtype, saved_dtype(spec, dtype), generator)
        else:
            _fill(weight, param, dtype, saved_dtype(spec, dtype), generator)
        if isinstance(weight, torch.Tensor) and not adds_bias(spec, name):
            weight.zero_()
        yield name, weight
        del weight
        done += param.numel
        if progress is not None:
            progress(done, total)


def saved_dtype(spec: DecoderSpec, dtype: torch.dtype) -> torch.dtype:
    """What a checkpoint with this config would hold."""
    known = spec.dtype is not None and spec.dtype in FLOATS.values()
    return getattr(torch, str(spec.dtype)) if known else dtype


def packed_dummies(spec: DecoderSpec, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each matrix when it is packed as a checkpoint would store it."""
    saved, params = saved_dtype(spec, dtype), spec.parameters()
    kinds = ("linear", "embedding", "experts")
    shapes = {name: param.shape for name, param in params.items() if param.kind in kinds}
    return {name: math.prod(shape[:-2]) * float_bytes(saved, *shape[-2:]) for name, shape in shapes.items()}


def _fill(weight: Weight, param: ParamSpec, dtype: torch.dtype, saved: torch.dtype, generator: torch.Generator) -> None:
    # Outputs of the size of the inputs: activations neither vanish nor overflow, however deep the model.
    deviation = param.shape[-1] ** -0.5
    if isinstance(weight, Experts):
        for expert in range(len(weight)):
            _fill(weight.linear(expert), replace(param, shape=param.shape[1:]), dtype, saved, generator)
    elif isinstance(weight, Linear):
        rows, columns = param.shape
        parts = _drawn(rows, columns, dtype, deviation, generator)
        if weight.scheme.in_one_part:
            # Without a form it is kept in the type it comes in.
            comes = saved if weight.scheme.as_in_file else dtype
            whole = torch.empty(rows, columns, dtype=comes, device=generator.device)
            for first, part in parts:
                whole[first : first + len(part)] = part
            del part  # the chunk, which would be held while the whole is written
            weight.scheme.write(weight.storage, 0, whole)
        else:
            for first, part in parts:
                weight.scheme.write(weight.storage, first, part)
    elif param.kind == "norm":
        weight.fill_(1)
    else:
        weight.normal_(0, deviation, generator=generator)


def _fill_part(
    weight: Weight, whole: ParamSpec, part: Held, dtype: torch.dtype, saved: torch.dtype, generator: torch.Generator
) -> None:
    """Draw the weight of the whole model, and keep what a rank holds of it."""
    full = torch.empty(whole.shape, dtype=dtype, device=generator.device)
    if not isinstance(weight, Linear):
        _fill(full, whole, dtype, saved, generator)
        if isinstance(weight, torch.Tensor):
            weight.copy_(_held(full, part))
            return
        rows, columns = _held(full, {dim: spans for dim, spans in part.items() if dim < 2}), part.get(2)
        for expert, one in enumerate(rows.to(saved) if weight.scheme.as_in_file else rows):
            write_columns(weight.linear(expert), 0, one, columns[0] if columns else range(whole.shape[2]))
        return
    for first, chunk in _drawn(whole.shape[0], whole.shape[1], dtype, whole.shape[1] ** -0.5, generator):
        full[first : first + len(chunk)] = chunk
    rows = _held(full, {dim: spans for dim, spans in part.items() if dim == 0})
    if weight.scheme.as_in_file:
        rows = rows.to(saved)
    write_columns(weight, 0, rows, part[1][0] if 1 in part else range(whole.shape[1]))


def _held(full: torch.Tensor, part: Held) -> torch.Tensor:
    for dim, spans in part.items():
        full = torch.cat([full.narrow(dim, span.start, len(span)) for span in spans], dim)
    return full


def _drawn(
    rows: int, columns: int, dtype: torch.dtype, deviation: float, generator: torch.Generator
) -> Iterator[tuple[int, torch.Tensor]]:
    """The first row of every chunk and its values, which the next chunk overwrites."""
    step = max(1, _CHUNK // columns)
    chunk = torch.empty(min(step, rows), columns, dtype=dtype, device=generator.device)
    for first in range(0, rows, step):
        yield first, chunk[: rows - first].normal_(0, deviation, generator=generator)
