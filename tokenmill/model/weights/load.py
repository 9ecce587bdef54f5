"""Loads a checkpoint into the decoder's weights: each tensor goes straight to its place in the final, fused ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tokenmill.errors import ModelError
from tokenmill.model.layers import ResidentWeights, Weight, WeightStore, allocate
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.checkpoint import BlockCheckpoint, Checkpoint, GroupCheckpoint, TypedCheckpoint
from tokenmill.model.weights.names import Piece, Recipe, is_harmless, recipes, spelled_as_in_transformers
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.packed import Blocks, can_pack, float_bytes, packed_bytes
from tokenmill.quant.schemes.scheme import Linear, Schemes, TakesBlocks, TakesGroups

LOADABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_weights(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,  # called with (parameters done, parameters in all)
    schemes: Schemes | None = None,
) -> WeightStore:
    """Peak memory is one copy of the weights plus the tensor being read."""
    _refuse_quantized(checkpoint)
    spelled = spelled_as_in_transformers(checkpoint.names())
    chosen = _choose(spec, spelled)
    place, schemes = torch.device(device), schemes or Schemes(Dense())
    params = spec.parameters()
    total, done = sum(param.numel for param in params.values()), 0
    tell = progress or (lambda done, total: None)
    tell(0, total)
    weights: dict[str, Weight] = {}
    upcoming = (spelled[piece.source] for name in params for piece in chosen[name])  # one ahead of what is filled
    next(upcoming)
    for name, param in params.items():
        weight = allocate(spec, param, dtype, place, schemes.of(name))
        before = done
        for piece in chosen[name]:
            if isinstance(checkpoint, BlockCheckpoint):
                checkpoint.prefetch(next(upcoming, spelled[piece.source]))
            _fill_from(checkpoint, spelled[piece.source], weight, piece, name in schemes.as_stored)
            done += math.prod(piece.shape)
            tell(min(done, before + param.numel), total)
        weights[name] = weight
        done = before + param.numel  # pieces may have had more than was used of them
        tell(done, total)
    return ResidentWeights(spec, weights)


def stored_forms(spec: DecoderSpec, checkpoint: Checkpoint) -> dict[str, WeightForm]:
    """The linear layers that a quantized checkpoint holds in one form each, under their canonical names."""
    if not isinstance(checkpoint, GroupCheckpoint):
        return {}
    spelled = spelled_as_in_transformers(checkpoint.names())
    found: dict[str, WeightForm] = {}
    for name, recipe in _choose(spec, spelled).items():
        if spec.parameters()[name].kind == "linear":
            forms = {None if piece.change else checkpoint.stored(spelled[piece.source]) for piece in recipe}
            form = forms.pop()
            if form is not None and not forms:
                found[name] = form
    return found


def packed_as_stored(spec: DecoderSpec, checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of each matrix when it is packed as the checkpoint stores it: in blocks, or in floats of its own width."""
    spelled = spelled_as_in_transformers(checkpoint.names())
    found = {}
    for name, recipe in _choose(spec, spelled).items():
        if spec.parameters()[name].kind in ("linear", "embedding"):
            found[name] = 0
            for piece in recipe:
                source, (rows, columns) = spelled[piece.source], piece.shape
                if (blocks := _blocks(checkpoint, source, piece)) is not None:
                    found[name] += packed_bytes(blocks.type_id, rows, columns)
                    continue
                # What is changed on the way to a matrix is the order of its rows.
                dtype = checkpoint.dtype(source) if isinstance(checkpoint, TypedCheckpoint) else None
                found[name] += float_bytes(dtype, rows, columns)
    return found


def _blocks(checkpoint: Checkpoint, name: str, piece: Piece) -> Blocks | None:
    """The source as it is stored, if it can be packed without another change than the order of its rows."""
    if not isinstance(checkpoint, BlockCheckpoint) or piece.change is not None or piece.expert is not None:
        return None
    blocks = checkpoint.blocks(name)
    return blocks if blocks is not None and blocks.shape == piece.shape and can_pack(blocks) else None


def _fill_from(checkpoint: Checkpoint, name: str, weight: Weight, piece: Piece, as_stored: bool) -> None:
    if isinstance(weight, Linear) and weight.scheme.as_in_file:
        assert isinstance(weight.scheme, TakesBlocks)
        blocks = _blocks(checkpoint, name, piece)
        if blocks is not None:
            weight.scheme.write_blocks(weight.storage, piece.first, blocks)
            _release(checkpoint, name)
            return
    if as_stored:
        assert isinstance(weight, Linear) and isinstance(weight.scheme, TakesGroups)
        assert isinstance(checkpoint, GroupCheckpoint)
        groups = checkpoint.groups(name)
        assert groups is not None  # `stored` said so
        weight.scheme.write_groups(weight.storage, piece.first, groups)
        return
    _fill(weight, piece, _read(checkpoint, name, piece, _kept_dtype(weight)))
    _release(checkpoint, name)


def _release(checkpoint: Checkpoint, name: str) -> None:
    if isinstance(checkpoint, BlockCheckpoint):
        checkpoint.release(name)


def _kept_dtype(weight: Weight) -> torch.dtype | None:
    """Of the floats that a tensor becomes without any other change; None: a scheme takes it as it is stored."""
    if not isinstance(weight, Linear):
        return weight.dtype
    return weight.storage["weight"].dtype if weight.scheme.floats else None


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
    extra = [name for name in spelled if name not in used and not is_harmless(spec, name)]
    if extra:
        raise ModelError(
            f"the checkpoint holds {_some(extra)}, which {spec.architecture} with this config.json does not use;"
            " leaving it out would change the results, so check that config.json belongs to these weights"
        )
    return chosen


def _read(checkpoint: Checkpoint, name: str, piece: Piece, kept: torch.dtype | None) -> torch.Tensor:
    if isinstance(checkpoint, BlockCheckpoint) and kept is not None and piece.change is None:
        tensor = checkpoint.tensor(name, kept)
    else:
        tensor = checkpoint.tensor(name)
    if tensor.dtype not in LOADABLE:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"tensor {name!r} is of type {kind}; only float64, float32, bfloat16 and float16 are read")
    if tuple(tensor.shape) != piece.shape:
        raise ModelError(
            f"tensor {name!r} has shape {list(tensor.shape)} but config.json implies {list(piece.shape)};"
            " check that config.json belongs to these weights"
        )
    return piece.change(tensor) if piece.change else tensor


def _fill(weight: Weight, piece: Piece, value: torch.Tensor) -> None:
    if isinstance(weight, Linear):
        weight.scheme.write(weight.storage, piece.first, value)
        return
    target = weight if piece.expert is None else weight[piece.expert]
    target[piece.first : piece.first + value.shape[0]].copy_(value)


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
