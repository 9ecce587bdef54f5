"""Options that scripts written for other engines pass: taken where they mean something here, refused with a reason."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import Any

from tokenmill.errors import ConfigError

_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# name -> (the value that changes nothing here, why any other is refused)
_FIXED: dict[str, tuple[Any, str]] = {
    "revision": (None, "the newest revision on the hub is used; download another one and give its path"),
    "trust_remote_code": (False, "code that comes with a checkpoint is never run"),
    "tokenizer_mode": ("auto", "there is one kind of tokenizer"),
}

# What a model is divided by -> as `parallel` says it
_DIVIDED = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp"}

# Formats of checkpoints under the names of another engine's kernels for them.
_KERNELS = {"awq_marlin": "awq", "gptq_marlin": "gptq"}

# These tune machinery that this engine does not have, and no value of them changes an answer.
_WITHOUT_EFFECT = ("disable_log_stats", "max_cpu_loras", "max_seq_len_to_capture", "swap_space")


def translate(options: dict[str, Any]) -> dict[str, Any]:
    """The same options in this engine's names."""
    found = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    for name, (neutral, why) in _FIXED.items():
        if name in found:
            _check_neutral(name, found.pop(name), (neutral,), why)
    sizes = {kind: found.pop(name) for name, kind in _DIVIDED.items() if name in found}
    if divided := ",".join(f"{kind}{size}" for kind, size in sizes.items() if size != 1):
        found.setdefault("parallel", divided)
    if "tokenizer" in found:
        own = (None, found.get("model", "default"))
        _check_neutral("tokenizer", found.pop("tokenizer"), own, "the tokenizer comes with the model")
    if "download_dir" in found:
        wanted = found.pop("download_dir")
        found.setdefault("cache_dir", wanted)
    if isinstance(folder := found.get("cache_dir"), os.PathLike):
        found["cache_dir"] = os.fspath(folder)
    if "cpu_offload_gb" in found:
        wanted = found.pop("cpu_offload_gb")
        if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not 0 <= wanted < 1e6:
            raise ConfigError(f"cpu_offload_gb is {wanted!r:.100}; it must be a number of GiB, 0 or more")
        found.setdefault("weights_offload", int(wanted * (1 << 30)) or None)  # there 0 means none where all fits
    if "enforce_eager" in found:
        found.setdefault("cuda_graphs", not found.pop("enforce_eager"))
    if isinstance(wanted := found.get("quantization"), str):
        found["quantization"] = _KERNELS.get(wanted, wanted)
    if str(found.get("kv_cache_dtype")) in ("fp8_e4m3", "torch.float8_e4m3fn"):
        found["kv_cache_dtype"] = "fp8"
    for option in ("dtype", "kv_cache_dtype"):
        name = str(found.get(option)).removeprefix("torch.")  # torch.float16 and "half" are float16
        if name in _DTYPES or name != str(found.get(option)):
            found[option] = _DTYPES.get(name, name)
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown name: the closest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...], why: str) -> None:
    if value not in neutral:
        raise ConfigError(f"{name}={value!r} cannot be respected: {why}; leave it out")
