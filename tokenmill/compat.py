"""Options that scripts written for other engines pass: taken where they mean something here, refused with a reason."""

from __future__ import annotations

from typing import Any

from tokenmill.errors import ConfigError

_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# name -> (the value that changes nothing here, why any other is refused)
_FIXED: dict[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, "one device is used"),
    "pipeline_parallel_size": (1, "one device is used"),
    "enable_chunked_prefill": (True, "prompts are always computed in chunks beside running answers"),
    "trust_remote_code": (False, "code that comes with a checkpoint is never run"),
    "tokenizer_mode": ("auto", "there is one kind of tokenizer"),
}


def translate(options: dict[str, Any]) -> dict[str, Any]:
    """The same options in this engine's names."""
    found = dict(options)
    for name, (neutral, why) in _FIXED.items():
        if name in found and (value := found.pop(name)) != neutral:
            raise ConfigError(f"{name}={value!r} cannot be respected: {why}; leave it out")
    if "enforce_eager" in found:
        found.setdefault("cuda_graphs", not found.pop("enforce_eager"))
    name = str(found.get("dtype")).removeprefix("torch.")  # torch.float16 and "half" are float16
    if name in _DTYPES or name != str(found.get("dtype")):
        found["dtype"] = _DTYPES.get(name, name)
    return found
