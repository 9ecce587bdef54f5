"""Opens what a model is loaded from: its weights and config, its tokenizer; and loads the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenmill.cache import layers_dir
from tokenmill.config import EngineConfig
from tokenmill.engine.identity import model_identity
from tokenmill.errors import ConfigError
from tokenmill.model.layers import ResidentWeights, WeightStore
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights.checkpoint import BlockCheckpoint, Checkpoint, read_config
from tokenmill.model.weights.source import ModelFiles
from tokenmill.offload.foresight import Foresight
from tokenmill.offload.load import Parameters, cache_from_disk, cache_from_host, stream_from_disk, stream_from_host
from tokenmill.offload.streamed import CachedExpertWeights, StreamedWeights
from tokenmill.ops.native.library import load as load_native
from tokenmill.plan.solve.offload import CachedExperts, StreamedLayers
from tokenmill.quant.schemes.scheme import Schemes

Progress = Callable[[int, int, str], None]  # done, in all, what


def open_checkpoint(config: EngineConfig, files: ModelFiles) -> tuple[Checkpoint | None, dict[str, Any]]:
    """The weights' source (None for dummy weights) and the model's config."""
    wanted = config.load_format
    if wanted == "dummy" and files.kind == "directory":
        return None, read_config(Path(files.path))
    if (wanted == "safetensors" and files.kind == "gguf") or (wanted == "gguf" and files.kind != "gguf"):
        raise ConfigError(f"load_format is {wanted!r} but {files.path} is a {files.kind}; use load_format='auto'")
    checkpoint: Checkpoint
    if files.kind == "gguf":
        from tokenmill.model.weights.gguf import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(files.path)
    else:
        from tokenmill.model.weights.quantized import open_quantized
        from tokenmill.model.weights.safetensors import SafetensorsCheckpoint

        checkpoint = SafetensorsCheckpoint(files.path)
        checkpoint = open_quantized(checkpoint)
    return (None if wanted == "dummy" else checkpoint), checkpoint.config


def load_tokenizer(files: ModelFiles, checkpoint: Checkpoint | None) -> Tokenizer:
    if files.kind == "directory":
        return Tokenizer.from_directory(files.path)
    from tokenmill.model.weights.gguf import GGUFCheckpoint

    return Tokenizer.from_gguf(checkpoint if isinstance(checkpoint, GGUFCheckpoint) else GGUFCheckpoint(files.path))


def load(
    config: EngineConfig,
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    tell: Progress,
) -> WeightStore:
    what, parameters = _parameters(config, spec, checkpoint, dtype, device, schemes, tell)
    weights = dict(parameters(lambda name: True, lambda done, total: tell(done, total, what)))
    return ResidentWeights(spec, weights, dtype, device)


def load_streamed(
    config: EngineConfig,
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    tell: Progress,
    away: StreamedLayers,
    files: ModelFiles,
    nbytes: int,  # about, of all layers
) -> StreamedWeights:
    """The same of a model whose layers are not all on the device."""
    _, parameters = _parameters(config, spec, checkpoint, dtype, device, schemes, tell)
    if device.type == "cuda":
        return stream_from_host(spec, parameters, dtype, device, schemes, away, tell)
    forms = sorted((name, schemes.of(name).name) for name in spec.parameters() if name.startswith("layers."))
    identity = model_identity(files, config.seed if checkpoint is None else None, str(dtype), forms)
    folder = layers_dir(config.cache_dir) / identity
    return stream_from_disk(folder, spec, parameters, dtype, schemes, away, nbytes, tell)


def load_cached(
    config: EngineConfig,
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    tell: Progress,
    cached: CachedExperts,
    files: ModelFiles,
) -> CachedExpertWeights:
    """The same of a mixture whose experts are not all on the device."""
    _, parameters = _parameters(config, spec, checkpoint, dtype, device, schemes, tell)
    foresight = Foresight({"lru": False, "predict": True}.get(config.expert_cache))
    if device.type == "cuda":
        return cache_from_host(spec, parameters, dtype, device, schemes, cached, foresight, tell)
    forms = sorted((name, schemes.of(name).name) for name in spec.parameters() if ".experts_" in name)
    identity = model_identity(files, config.seed if checkpoint is None else None, str(dtype), forms, "experts")
    folder = layers_dir(config.cache_dir) / identity
    return cache_from_disk(folder, spec, parameters, dtype, schemes, cached, foresight, tell)


def _parameters(
    config: EngineConfig,
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    tell: Progress,
) -> tuple[str, Parameters]:
    """Where they come from, and what is said meanwhile."""
    if checkpoint is None:
        from tokenmill.model.weights.dummy import draw_parameters

        return "making random weights", lambda wanted, tell: draw_parameters(
            spec, dtype, device, config.seed, schemes, tell, wanted
        )
    from tokenmill.model.weights.load import read_parameters

    if isinstance(checkpoint, BlockCheckpoint):  # the library unpacks blocks for every device
        load_native(tell, config.cache_dir)
    return "loading weights", lambda wanted, tell: read_parameters(
        spec, checkpoint, dtype, device, tell, schemes, wanted
    )
