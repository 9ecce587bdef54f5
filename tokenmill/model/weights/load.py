"""Loads a checkpoint into the decoder's weights: each tensor goes straight to its place in the final, fused ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.errors import ModelError
from tokenmill.model.layers import ResidentWeights, Weight, WeightStore, allocate
from tokenmill.model.spec import DecoderSpec, ParamSpec
from tokenmill.model.weights.checkpoint import BlockCheckpoint, Checkpoint
from tokenmill.model.weights.names import Piece, Recipe, canonical, is_harmless, recipes
from tokenmill.quant.packed import Blocks, Packed, can_pack, packed_bytes
from tokenmill.quant.scheme import Dense, Linear, QuantScheme, scheme_for

LOADABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_weights(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,  # called with (parameters done, parameters in all)
    scheme: QuantScheme | None = None,
) -> WeightStore:
    """Peak memory is one copy of the weights plus the tensor being read."""
    _refuse_quantized(checkpoint)
    spelled = canonical(checkpoint.names())
    chosen = _choose(spec, spelled)
    place, scheme = torch.device(device), scheme or Dense()
    params = spec.parameters()
    total, done = sum(param.numel for param in params.values()), 0
    weights: dict[str, Weight] = {}
    for name, param in params.items():
        weight = _allocate(spec, name, param, dtype, place, scheme, checkpoint, chosen[name], spelled)
        for piece in chosen[name]:
            _fill_from(checkpoint, spelled[piece.source], weight, piece)
        weights[name] = weight
        done += param.numel
        if progress is not None:
            progress(done, total)
    return ResidentWeights(spec, weights)


def stored_bytes(spec: DecoderSpec, checkpoint: Checkpoint, itemsize: int) -> int:
    """Bytes of the weights when every matrix that can be is packed as it is stored."""
    spelled = canonical(checkpoint.names())
    total = spec.weight_bytes(itemsize)
    for name, recipe in _choose(spec, spelled).items():
        if spec.parameters()[name].kind not in ("linear", "embedding"):
            continue
        for piece in recipe:
            blocks = _blocks(checkpoint, spelled[piece.source], piece)
            if blocks is not None:
                total += packed_bytes(blocks.type_id, *blocks.shape) - blocks.shape[0] * blocks.shape[1] * itemsize
    return total


def _allocate(
    spec: DecoderSpec,
    name: str,
    param: ParamSpec,
    dtype: torch.dtype,
    place: torch.device,
    scheme: QuantScheme,
    checkpoint: Checkpoint,
    recipe: Recipe,
    spelled: dict[str, str],
) -> Weight:
    """Room for one parameter; an embedding stays packed where it is stored so."""
    if isinstance(scheme, Packed):
        if name == "embed" and _blocks(checkpoint, spelled[recipe[0].source], recipe[0]) is not None:
            rows, columns = param.shape
            return Linear(scheme, scheme.allocate(rows, columns, dtype, place))
        return allocate(spec, param, dtype, place, scheme)
    return allocate(spec, param, dtype, place, scheme_for(name, scheme))


def _blocks(checkpoint: Checkpoint, name: str, piece: Piece) -> Blocks | None:
    """The source as it is stored, if it can be packed without another change than the order of its rows."""
    if not isinstance(checkpoint, BlockCheckpoint) or piece.change is not None or piece.expert is not None:
        return None
    blocks = checkpoint.blocks(name)
    return blocks if blocks is not None and blocks.shape == piece.shape and can_pack(blocks) else None


def _fill_from(checkpoint: Checkpoint, name: str, weight: Weight, piece: Piece) -> None:
    if isinstance(weight, Linear) and isinstance(weight.scheme, Packed):
        blocks = _blocks(checkpoint, name, piece)
        if blocks is not None:
            weight.scheme.write_blocks(weight.storage, piece.first, blocks)
            assert isinstance(checkpoint, BlockCheckpoint)
            checkpoint.release(name)
            return
    _fill(weight, piece, _read(checkpoint, name, piece))


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


def _read(checkpoint: Checkpoint, name: str, piece: Piece) -> torch.Tensor:
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
    if quantized:
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"the checkpoint is quantized with {method}, which cannot be loaded; use the original one or a GGUF file"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
