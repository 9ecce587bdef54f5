"""Loads a checkpoint into the decoder's weights: each tensor goes straight to its place in the final, fused ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tokenmill.errors import ModelError
from tokenmill.model.layers import ResidentWeights, Weight, WeightStore, allocate
from tokenmill.model.shard import adds_bias, held
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.checkpoint import (
    BlockCheckpoint,
    Checkpoint,
    GroupCheckpoint,
    PartCheckpoint,
    TypedCheckpoint,
)
from tokenmill.model.weights.cuts import (
    Box,
    Cut,
    check_shape,
    cut_group,
    cut_groups,
    cuts,
    put,
    scales_rows,
    write_columns,
)
from tokenmill.model.weights.expert_parts import by_expert
from tokenmill.model.weights.names import Piece, Recipe, is_harmless, recipes, spelled_as_in_transformers
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.experts import Experts
from tokenmill.quant.schemes.packed import Blocks, can_pack, float_bytes, packed_bytes
from tokenmill.quant.schemes.scheme import Linear, Schemes, TakesBlocks, TakesGroups

LOADABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_weights(
    spec: DecoderSpec,  # of the whole model, or of a rank's part, of which no more is read
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,  # called with (parameters done, parameters in all)
    schemes: Schemes | None = None,
) -> WeightStore:
    """Peak memory is one copy of the weights plus the tensor being read."""
    weights = dict(read_parameters(spec, checkpoint, dtype, device, progress, schemes))
    return ResidentWeights(spec, weights, dtype, torch.device(device))


def read_parameters(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
    schemes: Schemes | None = None,
    wanted: Callable[[str], bool] = lambda name: True,  # by canonical name
) -> Iterator[tuple[str, Weight]]:
    """One parameter after the other, in the order of the layers; nobody but the caller keeps them."""
    _refuse_quantized(checkpoint)
    spelled = spelled_as_in_transformers(checkpoint.names())
    chosen = _choose(spec, spelled)
    place, schemes = torch.device(device), schemes or Schemes(Dense())
    params, whole, parts = spec.parameters(), spec.whole.parameters(), held(spec)
    params = {name: param for name, param in params.items() if wanted(name)}
    total, done = sum(param.numel for param in params.values()), 0
    tell = progress or (lambda done, total: None)
    tell(0, total)
    planned = {
        name: [(piece, cut) for piece in chosen[name] for cut in cuts(piece, whole[name].shape, parts[name])]
        for name in params
    }
    upcoming = (spelled[piece.source] for plan in planned.values() for piece, _ in plan)  # one ahead of what is filled
    next(upcoming, None)
    blocked = checkpoint if isinstance(checkpoint, BlockCheckpoint) else None  # asked once: Python 3.11 takes long
    for name, param in params.items():
        weight = allocate(spec, param, dtype, place, schemes.of(name))
        before = done
        for piece, cut in planned[name]:
            if blocked is not None:
                blocked.prefetch(next(upcoming, spelled[piece.source]))
            _fill_from(checkpoint, spelled[piece.source], weight, piece, cut, name in schemes.as_stored)
            done += cut.numel
            tell(min(done, before + param.numel), total)
        if isinstance(weight, torch.Tensor) and not adds_bias(spec, name):
            weight.zero_()
        yield name, weight
        del weight
        done = before + param.numel  # pieces may have had more than was used of them
        tell(done, total)


def stored_forms(spec: DecoderSpec, checkpoint: Checkpoint) -> dict[str, WeightForm]:
    """The linear layers and experts that a quantized checkpoint holds in one form each, under their canonical names."""
    if not isinstance(checkpoint, GroupCheckpoint):
        return {}
    spelled = spelled_as_in_transformers(checkpoint.names())
    found: dict[str, WeightForm] = {}
    whole, parts = spec.whole.parameters(), held(spec)
    for name, recipe in _choose(spec, spelled).items():
        if whole[name].kind in ("linear", "experts"):
            forms = {
                None if piece.change else _cut_form(checkpoint.stored(spelled[piece.source]), cut)
                for piece in recipe
                for cut in cuts(piece, whole[name].shape, parts[name])
            }
            form = forms.pop()
            if form is not None and not forms:
                found[name] = form
    return found


def _cut_form(form: WeightForm | None, cut: Cut) -> WeightForm | None:
    group = None if form is None else cut_group(form.group, cut)
    return None if form is None or group == 0 else replace(form, group=group)


def packed_as_stored(spec: DecoderSpec, checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of each matrix when it is packed as the checkpoint stores it: in blocks, or in floats of its own width."""
    spelled = spelled_as_in_transformers(checkpoint.names())
    found = {}
    whole, parts = spec.whole.parameters(), held(spec)
    typed = checkpoint if isinstance(checkpoint, TypedCheckpoint) else None
    blocked = checkpoint if isinstance(checkpoint, BlockCheckpoint) else None
    for name, recipe in _choose(spec, spelled).items():
        if whole[name].kind not in ("linear", "embedding", "experts"):
            continue
        found[name] = 0
        for piece in recipe:
            source = spelled[piece.source]
            # What is changed on the way to a matrix is the order of its rows.
            dtype = typed.dtype(source) if typed is not None else None
            for cut in cuts(piece, whole[name].shape, parts[name]):
                *stacked, rows, columns = map(len, cut.source)
                blocks = None if stacked else _blocks(blocked, source, replace(piece, expert=None), cut)
                kept = packed_bytes(blocks.type_id, rows, columns) if blocks else float_bytes(dtype, rows, columns)
                found[name] += math.prod(stacked) * kept
    return found


def _blocks(checkpoint: BlockCheckpoint | None, name: str, piece: Piece, cut: Cut) -> Blocks | None:
    """The source as it is stored, if it can be packed without another change than the order of its rows."""
    if checkpoint is None or piece.change is not None or piece.expert is not None:
        return None
    blocks = checkpoint.blocks(name)
    if blocks is None or blocks.shape != piece.shape or not can_pack(blocks):
        return None
    return blocks if cut.whole else blocks.cut(*cut.source)


def _fill_from(checkpoint: Checkpoint, name: str, weight: Weight, piece: Piece, cut: Cut, as_stored: bool) -> None:
    if isinstance(weight, Experts):
        for expert, its, one, part in by_expert(checkpoint, name, piece, cut):
            _fill_from(its, name, weight.linear(expert), one, part, as_stored)
        return
    first = cut.target[0].start
    blocked = checkpoint if isinstance(checkpoint, BlockCheckpoint) else None
    if isinstance(weight, Linear) and weight.scheme.as_in_file:
        blocks = _blocks(blocked, name, piece, cut)
        if blocked is not None and blocks is not None:
            assert isinstance(weight.scheme, TakesBlocks)
            weight.scheme.write_blocks(weight.storage, first, blocks)
            blocked.release(name)
            return
    if as_stored:
        assert isinstance(weight, Linear) and isinstance(weight.scheme, TakesGroups)
        assert isinstance(checkpoint, GroupCheckpoint)
        groups = checkpoint.groups(name)
        assert groups is not None  # `stored` said so
        weight.scheme.write_groups(weight.storage, first, cut_groups(groups, cut))
        return
    if not isinstance(weight, Linear):
        put(weight, cut, piece, _read(checkpoint, name, piece, weight.dtype, cut.source))
    elif scales_rows(weight.scheme):
        rows = _read(checkpoint, name, piece, None, (cut.source[0], range(piece.shape[1])))
        write_columns(weight, first, rows, cut.source[1])
    else:
        kept = weight.storage["weight"].dtype if weight.scheme.floats else None
        weight.scheme.write(weight.storage, first, _read(checkpoint, name, piece, kept, cut.source))
    if blocked is not None:
        blocked.release(name)


def _choose(spec: DecoderSpec, spelled: dict[str, str]) -> dict[str, Recipe]:
    """For each parameter the first recipe that the checkpoint can serve; every tensor must be accounted for."""
    chosen: dict[str, Recipe] = {}
    missing: list[str] = []
    for name, ways in recipes(spec).items():
        fitting = next((way for way in ways if all(piece.source in spelled for piece in way)), None)
        if fitting is None:
            missing += [piece.source for piece in ways[0] if piece.source not in spelled]
        else:
            chosen[name] = fitting
    if missing:
        raise ModelError(
            f"the checkpoint lacks {_some(missing)}, which {spec.architecture} with this config.json needs;"
            " it is incomplete or belongs to another config"
        )
    used = {piece.source for recipe in chosen.values() for piece in recipe}
    if spec.stage is not None:  # other stages account for what they lack
        used |= {one.source for ways in recipes(spec.stage.model).values() for way in ways for one in way}
    extra = [name for name in spelled if name not in used and not is_harmless(spec, name)]
    if extra:
        raise ModelError(
            f"the checkpoint holds {_some(extra)}, which {spec.architecture} with this config.json does not use;"
            " leaving it out would change the results, so check that config.json belongs to these weights"
        )
    return chosen


def _read(
    checkpoint: Checkpoint,
    name: str,
    piece: Piece,
    kept: torch.dtype | None,  # of the floats that it becomes without any other change; None: it is taken as stored
    box: Box,
) -> torch.Tensor:
    """A tensor, or no more of it than is needed where the checkpoint can do that."""
    kept = None if piece.change is not None else kept
    if tuple(map(len, box)) != piece.shape and isinstance(checkpoint, PartCheckpoint):
        check_shape(name, checkpoint.shape(name), piece)
        tensor = checkpoint.part(name, box, kept)
    else:
        blocked = isinstance(checkpoint, BlockCheckpoint) and kept is not None
        tensor = checkpoint.tensor(name, kept) if blocked else checkpoint.tensor(name)  # type: ignore[call-arg]
        check_shape(name, tuple(tensor.shape), piece)
        tensor = tensor[tuple(slice(span.start, span.stop) for span in box)]
    if tensor.dtype not in LOADABLE:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"tensor {name!r} is of type {kind}; only float64, float32, bfloat16 and float16 are read")
    return piece.change(tensor) if piece.change else tensor


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    quantized = checkpoint.config.get("quantization_config")
    if quantized and not isinstance(checkpoint, GroupCheckpoint):
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"the checkpoint is quantized with {method}, which cannot be loaded; use the original one or a GGUF file"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
