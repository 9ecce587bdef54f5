"""Scripts written for other engines move over by changing an import."""

from __future__ import annotations

import pytest
import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError


def test_common_options_of_other_engines_are_understood() -> None:
    config = EngineConfig.from_options(
        model="m", dtype="half", enforce_eager=True, tensor_parallel_size=1, trust_remote_code=False,
        enable_chunked_prefill=True, gpu_memory_utilization=0.8,
    )  # fmt: skip
    assert (config.dtype, config.cuda_graphs, config.gpu_memory_utilization) == ("float16", False, 0.8)
    assert EngineConfig.from_options(dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("option", "value"),
    [("tensor_parallel_size", 2), ("trust_remote_code", True), ("enable_chunked_prefill", False)],
)
def test_what_cannot_be_respected_is_refused_with_the_reason(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}=.*leave it out"):
        EngineConfig.from_options(**{option: value})
