"""EngineConfig: the one tree of settings. What is left unset is solved, and the reason is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenmill.cache import root
from tokenmill.compat import did_you_mean, translate
from tokenmill.errors import ConfigError
from tokenmill.quant.forms import STORED, parse_layout

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
BATCHINGS = ("continuous", "dynamic", "static")
KV_RESERVATIONS = ("on_demand", "max_model_len")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8", "int4")


@dataclass(frozen=True)
class EngineConfig:
    """Every setting of an engine. None (or "auto") means: solve it from the hardware and the model."""

    model: str = "default"  # the default model, a directory, a .gguf file, or a hub name
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"  # auto, cpu, cuda, cuda:0
    # How linear layers are stored and multiplied: int8, int4, w8a8, fp8, auto, or forms per layer (quant/forms.py).
    quantization: str | Mapping[str, str] | None = None
    max_model_len: int | None = None  # longest prompt + output
    max_num_seqs: int | None = None  # rows: requests that run at once
    max_num_batched_tokens: int | None = None  # tokens per step
    gpu_memory_utilization: float = 0.9  # share of the device's memory that may be used
    kv_cache_memory: int | None = None  # bytes
    kv_cache_dtype: str = "auto"  # how keys and values are stored; on GPUs as the model computes, or in int8, fp8, int4
    block_size: int | None = None  # tokens per KV block
    enable_prefix_caching: bool = True
    # The ways before ours, for comparison (docs/ladder.md): nothing is gained by setting these.
    kv_cache: bool = True  # False: everything is computed again for every token
    kv_reservation: str = "on_demand"  # max_model_len: a request has memory for the longest from its start
    batching: str = "continuous"  # dynamic: nobody enters a running batch; static: nobody leaves it either, and it pads
    enable_chunked_prefill: bool = True  # False: prompts are computed whole, in steps of their own
    cuda_graphs: bool = True  # record steps and replay them: see engine/runner
    prompt_graphs: bool = True  # with that, steps that read prompts, too; on a GPU decode steps take 1-2 % longer then
    warm_up: bool = True  # compile and try all kernels of a GPU before the engine is ready
    shared_prefix_attention: bool = True  # read a beginning that many decoding rows share once per step (NVIDIA GPUs)
    adaptive_precision: bool = True  # what overflows in float16 or bfloat16 is computed again in float32, and told
    batch_invariant: bool = False  # the same bits for a request whatever runs beside it; slower
    overlap: bool | None = None  # launch a step before the one before it is committed; unset: on GPUs
    policy: str = "priority"  # priority, fcfs, or sjf (shortest predicted answer first, within classes)
    slo_itl_ms: float | None = None  # 95th percentile between tokens: prompt tokens per step follow it; unset: fixed
    slo_ttft_ms: float | None = None  # of first tokens; with slo_itl_ms
    max_queued_requests: int = 100_000
    max_queued_tokens: int = 50_000_000
    ops: str | dict[str, str] | None = None  # implementation to prefer: for all ops, or per op
    skip_tokenizer_init: bool = False
    seed: int = 0
    cache_dir: str | None = None  # where downloads and builds are kept; unset: TOKENMILL_CACHE and so on (cache.py)

    def __post_init__(self) -> None:
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("batching", self.batching, BATCHINGS)
        _one_of("kv_reservation", self.kv_reservation, KV_RESERVATIONS)
        _one_of("policy", self.policy, ("priority", "fcfs", "sjf"))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "block_size"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise ConfigError(f"{name} is {value!r}; it must be a positive whole number, or unset to be solved")
        for name in ("max_queued_requests", "max_queued_tokens"):
            if not _is_positive(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a positive whole number")
        for name in (
            "enable_prefix_caching",
            "kv_cache",
            "enable_chunked_prefill",
            "cuda_graphs",
            "prompt_graphs",
            "warm_up",
            "shared_prefix_attention",
            "adaptive_precision",
            "batch_invariant",
            "skip_tokenizer_init",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.overlap not in (None, True, False):
            raise ConfigError(f"overlap is {self.overlap!r}; it must be True, False, or unset to be solved")
        for name in ("slo_itl_ms", "slo_ttft_ms"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ConfigError(f"{name} is {value!r}; it must be a number of milliseconds above 0, or unset")
        if self.slo_ttft_ms is not None and self.slo_itl_ms is None:
            raise ConfigError("slo_ttft_ms is weighed against slo_itl_ms; set that, too")
        if self.cache_dir is not None:
            if not isinstance(self.cache_dir, str):
                raise ConfigError(f"cache_dir is {self.cache_dir!r}; it must be the path of a folder, or unset")
            root(self.cache_dir)  # refuses an empty one
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number")
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two, such as 16")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share!r}; it must be above 0 and at most 1")
        if self.quantization not in ("auto", *STORED):  # whether the checkpoint has that format is seen when it is read
            parse_layout(self.quantization)
        if self.batch_invariant and self.quantization not in (None, *STORED):
            raise ConfigError(
                f"batch_invariant is set and quantization is {self.quantization!r}, whose products depend on the "
                "batch; leave one of them out"
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from keyword arguments, naming the closest setting when one is unknown."""
        options = translate(options)
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"there is no setting {name!r}; {did_you_mean(name, known)}")
        return cls(**options)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
