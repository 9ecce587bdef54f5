"""What serving adapters takes of an engine: room in the memory plan, slots on the device, the store and the pool."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.adapter_store import AdapterStore
from tokenmill.engine.adapters import AdapterPool
from tokenmill.engine.core import Engine
from tokenmill.engine.rank_model import Prepared, RankRunner
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.errors import ConfigError
from tokenmill.model.adapters.peft import Base
from tokenmill.model.adapters.slots import AdapterSlots
from tokenmill.ops.native.library import Library
from tokenmill.plan.solve.hardware import GIB
from tokenmill.plan.solve.memory import ModelBytes

_MIB = 1 << 20


def check_adapters(config: EngineConfig) -> None:
    """Refuse what cannot be had together yet."""
    if config.enable_lora and (config.parallel is not None or config.batch_invariant):
        what = f"parallel is {config.parallel!r}" if config.parallel is not None else "batch_invariant is set"
        raise ConfigError(f"enable_lora is set and {what}, which cannot be had together yet; leave one of them out")


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


def with_slots(sizes: ModelBytes, config: EngineConfig, base: Base) -> ModelBytes:
    """For the memory plan."""
    return replace(sizes, weights=sizes.weights + config.max_loras * base.slot_bytes())


def add_adapters(config: EngineConfig, base: Base, engine: Engine, runner: RankRunner) -> list[str]:
    """Join them to a built engine; one line of the report."""
    decoder = runner.decoder
    slots = AdapterSlots(base, config.max_loras, decoder.weights.device, decoder.ops.add_low_rank)
    assert isinstance(runner, TorchRunner)  # `parallel` is refused
    runner.serve_adapters(slots.updates)
    if config.warm_up and decoder.weights.device.type == "cuda":
        slots.try_out()
    engine.adapters = AdapterStore(base, slots, config.lora_host_memory)
    engine.scheduler.parts[0].life.adapters = AdapterPool(config.max_loras, engine.adapters)
    size, dtype = config.max_loras * base.slot_bytes(), str(base.dtype).removeprefix("torch.")
    return [
        f"adapters     {config.max_loras} of rank {base.max_rank} or less on the device in {dtype} "
        f"({size / _MIB:,.0f} MiB of the weights), {config.lora_host_memory / GIB:.2f} GiB for others on the host"
    ]
