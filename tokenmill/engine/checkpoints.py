"""Opens what a model is loaded from: its weights and config, its tokenizer; and loads the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.model.layers import WeightStore
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights.checkpoint import BlockCheckpoint, Checkpoint, read_config
from tokenmill.model.weights.source import ModelFiles
from tokenmill.ops.native.library import load as load_native
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
    if checkpoint is None:
        from tokenmill.model.weights.dummy import dummy_weights

        drawn = lambda done, total: tell(done, total, "making random weights")  # noqa: E731
        return dummy_weights(spec, dtype, device, config.seed, schemes, drawn)
    from tokenmill.model.weights.load import load_weights

    if isinstance(checkpoint, BlockCheckpoint):  # the library unpacks blocks for every device
        load_native(tell, config.cache_dir)
    return load_weights(
        spec, checkpoint, dtype, device, lambda done, total: tell(done, total, "loading weights"), schemes
    )
