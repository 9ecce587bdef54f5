"""What adapters take of a rank: the model that they are checked against, slots for its part, and bytes for the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.model.adapters.peft import Base
from tokenmill.model.adapters.slots import AdapterSlots, slot_bytes
from tokenmill.ops.native.library import Library
from tokenmill.ops.registry import Ops
from tokenmill.plan.solve.memory import ModelBytes

if TYPE_CHECKING:
    from tokenmill.engine.rank_model import Prepared


def adapter_base(config: EngineConfig, made: Prepared) -> Base | None:
    """None: nobody may name an adapter."""
    if not config.enable_lora:
        return None
    dtype, saved = made.dtype, getattr(torch, made.spec.dtype or "float32")
    if config.dtype == "auto" and isinstance(made.native, Library):  # bytes are what adapters cost there
        rounded = made.schemes.default.kv_dtype is not None and not made.schemes.exact
        if rounded or saved in (torch.float16, torch.bfloat16):  # no finer than the weights that it is added to
            dtype = torch.float16 if rounded else saved
    return Base(made.spec, made.files.name, config.max_lora_rank, dtype)


def bytes_of_slots(config: EngineConfig, base: Base, made: Prepared) -> int:
    """Of the fullest rank."""
    return config.max_loras * max(slot_bytes(base, stage) for stage in made.stages)


def with_slots(sizes: ModelBytes, config: EngineConfig, base: Base, made: Prepared) -> ModelBytes:
    """For the memory plan."""
    return replace(sizes, weights=sizes.weights + bytes_of_slots(config, base, made))


def adapter_slots(config: EngineConfig, made: Prepared, ops: Ops) -> AdapterSlots | None:
    """Those of a rank."""
    base = adapter_base(config, made)
    if base is None:
        return None
    if "add_low_rank" not in ops.chosen:  # an optional op, which whoever does not ask for it can do without
        raise ConfigError(
            "enable_lora and batch_invariant are set, but what adds adapters here computes rows in another order when "
            "there are others beside them: it takes a CPU with the native library; leave one of them out"
        )
    return AdapterSlots(base, made.part, config.max_loras, made.device, ops.add_low_rank)
