"""What joins adapters to an engine: the store that they are kept in, and the pool that says who has a slot."""

from __future__ import annotations

from tokenmill.config import EngineConfig
from tokenmill.engine.adapter_room import bytes_of_slots
from tokenmill.engine.adapter_store import AdapterStore
from tokenmill.engine.adapters import AdapterPool
from tokenmill.engine.core import Engine
from tokenmill.engine.rank_model import RankModel
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.line import MOST
from tokenmill.errors import ConfigError
from tokenmill.model.adapters.peft import Base
from tokenmill.parallel.layout import parse_layout
from tokenmill.plan.solve.hardware import GIB

_MIB = 1 << 20
LARGEST_ADAPTER = MOST - 16 * _MIB  # bytes of one that a line takes, with what it says beside the factors


def check_adapters(config: EngineConfig) -> None:
    """Refuse what cannot be had together yet."""
    if not config.enable_lora:
        return
    layout = parse_layout(config.parallel)
    if layout.dp > 1:
        raise ConfigError(
            f"enable_lora is set and parallel is {config.parallel!r}, but ranks with requests of their own (dp) have "
            "no adapters yet; divide the model (tp, pp) or leave one of them out"
        )
    if config.batch_invariant and layout.ranks > 1:
        raise ConfigError(
            f"enable_lora and batch_invariant are set and parallel is {config.parallel!r}, but what ranks add of an "
            "adapter has other bits than one rank's; leave one of the three out"
        )


def add_adapters(
    config: EngineConfig, base: Base, engine: Engine, model: RankModel, group: RankGroup | None
) -> list[str]:
    """Join them to a built engine; one line of the report."""
    slots, device = model.adapters, model.prepared.device
    assert slots is not None
    if config.warm_up and device.type == "cuda":
        slots.try_out()
    write = slots.write if group is None else group.write_adapter
    most = None if config.rank_listen is None else LARGEST_ADAPTER
    engine.adapters = AdapterStore(base, write, config.lora_host_memory, device.type == "cuda", most)
    engine.scheduler.parts[0].life.adapters = AdapterPool(config.max_loras, engine.adapters)
    size, dtype = bytes_of_slots(config, base, model.prepared), str(base.dtype).removeprefix("torch.")
    each = "the device" if group is None else "each rank"
    return [
        f"adapters     {config.max_loras} of rank {base.max_rank} or less on {each} in {dtype} "
        f"({size / _MIB:,.0f} MiB of the weights), {config.lora_host_memory / GIB:.2f} GiB for others on the host"
    ]
