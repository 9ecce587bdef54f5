"""Scripts written for other engines move over: names are the same, and what has no counterpart says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenmill.compat import did_you_mean
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError


def test_common_options_of_other_engines_are_understood() -> None:
    config = EngineConfig.from_options(
        model="m", dtype="half", enforce_eager=True, tensor_parallel_size=1, trust_remote_code=False,
        enable_chunked_prefill=True, gpu_memory_utilization=0.8,
    )  # fmt: skip
    assert (config.dtype, config.cuda_graphs, config.gpu_memory_utilization) == ("float16", False, 0.8)
    assert EngineConfig.from_options(dtype=torch.bfloat16).dtype == "bfloat16"
    assert EngineConfig.from_options(download_dir="/models").cache_dir == "/models"
    assert EngineConfig.from_options(cache_dir=Path("/models")).cache_dir == "/models"
    assert EngineConfig.from_options(cpu_offload_gb=1.5).weights_offload == 3 << 29
    assert EngineConfig.from_options(cpu_offload_gb=0).weights_offload is None
    for wrong in ("x", None, [1], -1, float("nan")):
        with pytest.raises(ConfigError, match=r"cpu_offload_gb is .*; it must be a number of GiB"):
            EngineConfig.from_options(cpu_offload_gb=wrong)
    assert EngineConfig.from_options(kv_cache_dtype="half").kv_cache_dtype == "float16"
    assert EngineConfig.from_options(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8_e5m2'; it must be one of auto, float32"):
        EngineConfig.from_options(kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("disable_log_stats", True),
        ("disable_log_stats", False),
        ("swap_space", 4),
        ("max_seq_len_to_capture", 8192),
        ("kv_cache_dtype", "auto"),
        ("revision", None),
        ("tokenizer", None),
        ("tokenizer", "m"),
        ("quantization", None),
        ("max_cpu_loras", 4),
    ],
)
def test_options_that_change_no_answer_are_dropped(option: str, value: object) -> None:
    assert EngineConfig.from_options(model="m", **{option: value}) == EngineConfig(model="m")


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [("awq", "awq"), ("awq_marlin", "awq"), ("gptq_marlin", "gptq"), ("compressed-tensors",) * 2, ("gguf", "gguf")],
)
def test_a_checkpoints_format_is_kept_to_be_compared_with_the_checkpoint(theirs: str, kept: str) -> None:
    assert EngineConfig.from_options(quantization=theirs).quantization == kept
    assert EngineConfig.from_options(quantization=theirs, batch_invariant=True).batch_invariant


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("trust_remote_code", True, "never run"),
        ("revision", "v1", "give its path"),
        ("tokenizer", "other", "the tokenizer comes with the model"),
    ],
)
def test_what_cannot_be_respected_is_refused_with_the_reason(option: str, value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=.*{why}.*; leave it out"):
        EngineConfig.from_options(model="m", **{option: value})


@pytest.mark.parametrize(("sizes", "parallel"), [((1, 1), None), ((2, 1), "tp2"), ((1, 3), "pp3"), ((2, 2), "tp2,pp2")])
def test_sizes_of_ranks_become_one_line(sizes: tuple[int, int], parallel: str | None) -> None:
    tensor, pipeline = sizes
    config = EngineConfig.from_options(model="m", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    assert config.parallel == parallel
    with pytest.raises(ConfigError, match="parallel is 'tptwo'; it is the kinds tp, pp"):
        EngineConfig.from_options(model="m", tensor_parallel_size="two")


def test_an_unknown_name_is_answered_with_the_closest_one_or_with_all() -> None:
    assert did_you_mean("temprature", ["top_p", "temperature"]) == "did you mean 'temperature'?"
    assert did_you_mean("colour", ["top_p", "n"]) == "there are n, top_p"
