"""`quantization="awq"` and the like name a checkpoint's own format: right for such a checkpoint, refused for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.choices import schemes_for
from tokenmill.errors import ConfigError
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.checkpoint import Checkpoint
from tokenmill.model.weights.quantized import open_quantized
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.quant.schemes.choose import ComputeTarget

DATA = Path(__file__).parent / "data"
PLACE = ComputeTarget(torch.device("cpu"), torch.float32)


def opened(name: str) -> Checkpoint:
    return open_quantized(SafetensorsCheckpoint(DATA / name))


def asked(wanted: str | None, checkpoint: Checkpoint | None, config: dict | None = None, **more: bool):
    spec = spec_from_config(checkpoint.config if checkpoint else config)
    return schemes_for(EngineConfig.from_options(quantization=wanted, **more), spec, checkpoint, PLACE)


@pytest.mark.parametrize(
    ("folder", "names"),
    [("awq", ["awq", "awq_marlin"]), ("gptq_v1", ["gptq", "gptq_marlin"]), ("w8a16_channel", ["compressed-tensors"])],
)
def test_the_format_that_a_checkpoint_has_changes_nothing(folder: str, names: list[str]) -> None:
    as_it_is, why = asked(None, opened(folder))
    for name in names:
        found, same = asked(name, opened(folder))
        assert found.as_stored == as_it_is.as_stored != frozenset() and same == why == "as stored"


@pytest.mark.parametrize(
    ("folder", "name", "what"),
    [
        ("gptq_v1", "awq", "the checkpoint is quantized with gptq"),
        ("awq", "gguf", "the checkpoint is quantized with awq"),
        ("mixed", "gptq_marlin", "the checkpoint is quantized with compressed-tensors"),
    ],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_another_format_is_refused_with_what_the_checkpoint_is(
    folder: str, name: str, what: str, invariant: bool
) -> None:
    with pytest.raises(ConfigError, match=f"{what}; leave it out, or take .*int8, int4, w8a8, fp8, bf16, fp16, fp32"):
        asked(name, opened(folder), batch_invariant=invariant)


def test_a_gguf_file_has_a_format_of_its_own(default_model: str) -> None:
    from tokenmill.model.weights.gguf import GGUFCheckpoint

    file = GGUFCheckpoint(default_model)
    assert asked("gguf", file)[1] == "as stored"
    with pytest.raises(ConfigError, match="'awq' is a format of checkpoints, but the checkpoint is a GGUF file"):
        asked("awq", file)


class Floats:
    """A checkpoint that nobody quantized."""

    def __init__(self) -> None:
        self.config = {key: value for key, value in opened("awq").config.items() if key != "quantization_config"}

    def names(self) -> list[str]:
        return []

    def tensor(self, name: str) -> torch.Tensor:
        raise KeyError(name)


def test_a_format_is_refused_for_floats() -> None:
    with pytest.raises(ConfigError, match="'awq' is a format of checkpoints, but the checkpoint is not quantized"):
        asked("awq", Floats())
    with pytest.raises(ConfigError, match="dummy weights are floats"):
        asked("gptq", None, Floats().config)
