"""Loads a checkpoint into the decoder's weights: each tensor goes straight to its place in the final, fused ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.errors import ModelError
from tokenmill.model.layers import ResidentWeights, Weight, WeightStore, allocate
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.checkpoint import Checkpoint
from tokenmill.model.weights.names import Piece, Recipe, canonical, is_harmless, recipes
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
        weight = allocate(spec, param, dtype, place, scheme_for(name, scheme))
        for piece in chosen[name]:
            _fill(weight, piece, _read(checkpoint, spelled[piece.source], piece))
        weights[name] = weight
        done += param.numel
        if progress is not None:
            progress(done, total)
    return ResidentWeights(spec, weights)


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
