"""Reads quantized checkpoints of public formats: compressed-tensors, GPTQ, AWQ and float8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelError
from tokenmill.model.config_reader import errors_with_path
from tokenmill.model.weights.checkpoint import Checkpoint, read_json
from tokenmill.model.weights.quantized.awq import AWQ
from tokenmill.model.weights.quantized.checkpoint import Format, QuantizedCheckpoint
from tokenmill.model.weights.quantized.compressed_tensors import CompressedTensors
from tokenmill.model.weights.quantized.fp8 import Fp8Files
from tokenmill.model.weights.quantized.gptq import GPTQ

__all__ = ["QuantizedCheckpoint", "open_quantized"]

_FORMATS: dict[str, Callable[[dict[str, Any]], Format]] = {
    form.method: form for form in (CompressedTensors, GPTQ, AWQ, Fp8Files)
}
_KEYS = ("quantization_config", "compression_config")  # the second is what old compressed-tensors files have
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # where old tools wrote their settings
_MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")


def open_quantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself if it is not quantized; one that reads its format if it is, or a sentence why not."""
    with errors_with_path(checkpoint.config):
        config = _config(checkpoint)
    if config is None:
        mark = next((name for name in checkpoint.names() if name.endswith(_MARKS)), None)
        if mark is not None:
            raise ModelError(
                f"the checkpoint holds {mark!r}, so it is quantized, but config.json has no quantization_config;"
                " download config.json again"
            )
        return checkpoint
    method = config.get("quant_method")
    form = _FORMATS.get(method) if isinstance(method, str) else None
    if form is None:
        raise ModelError(
            f"the checkpoint is quantized with quant_method={method!r}, which cannot be loaded; there are"
            f" {', '.join(_FORMATS)} and GGUF files: use one of those, or the original checkpoint with quantization="
        )
    return QuantizedCheckpoint(checkpoint, form(config))


def _config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    inner = checkpoint.config.get("text_config")
    for holder in (checkpoint.config, inner if isinstance(inner, dict) else {}):
        for key in _KEYS:
            found = holder.get(key)
            if found is not None and not isinstance(found, dict):
                raise ModelError(f"config.json has {key}={found!r}; it must be a JSON object")
            if found:
                return found
    directory = getattr(checkpoint, "directory", None)
    if isinstance(directory, Path) and any(name.endswith(".qweight") for name in checkpoint.names()):
        for name, method in _BESIDE.items():
            if (directory / name).is_file():
                return {"quant_method": method} | read_json(directory / name)
    return None
