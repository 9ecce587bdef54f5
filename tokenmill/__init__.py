"""tokenmill: an LLM inference engine that is fast, small enough to read, and shows its work."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenmill.collector import collector_paused

if TYPE_CHECKING:
    from tokenmill.async_llm import AsyncLLM
    from tokenmill.config import EngineConfig
    from tokenmill.llm import LLM
    from tokenmill.lora import LoRARequest
    from tokenmill.outputs import CompletionOutput, RequestOutput
    from tokenmill.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "LoRARequest", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "tokenmill.llm",
    "AsyncLLM": "tokenmill.async_llm",
    "CompletionOutput": "tokenmill.outputs",
    "EngineConfig": "tokenmill.config",
    "LoRARequest": "tokenmill.lora",
    "RequestOutput": "tokenmill.outputs",
    "SamplingParams": "tokenmill.params",
}


def __getattr__(name: str) -> Any:
    """Names load when they are used, so that `tokenmill --help` does not pay for torch."""
    if name in _HOMES:
        with collector_paused():
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
