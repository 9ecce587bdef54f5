"""The places beside the device that an engine keeps blocks in, as its settings say."""

from __future__ import annotations

from tokenmill.config import EngineConfig
from tokenmill.engine.core import Engine
from tokenmill.engine.runner.block_memory import EngineMemory
from tokenmill.engine.scheduler import Scheduler
from tokenmill.errors import ConfigError
from tokenmill.kv.tiers.disk import open_disk
from tokenmill.kv.tiers.fabric import NixlFabric
from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.listener import TierListener
from tokenmill.kv.tiers.queued import ThreadBell
from tokenmill.kv.tiers.remote import RemoteTier
from tokenmill.kv.transfers import Tier, Transfers
from tokenmill.kv.transport import Checksum, Namespace
from tokenmill.ops.native.checksum import checksum
from tokenmill.peers import address_of, read_secret
from tokenmill.plan.solve.hardware import GIB, cpu_hardware

MIB = 1 << 20


def wants_tiers(config: EngineConfig) -> bool:
    return any(one is not None for one in (config.kv_host_memory, config.kv_disk_path, config.kv_push_to))


def add_tiers(config: EngineConfig, engine: Engine, weights: str, memory: EngineMemory | None) -> list[str]:
    """Join them to a built engine; one line of the report for each. weights: what blocks are computed with; memory:
    where these lie, if anybody can read and write the blocks of all ranks."""
    if not wants_tiers(config):
        return []
    assert memory is not None and isinstance(engine.scheduler, Scheduler)  # refused before: `start_ranks`
    kv = engine.scheduler.kv
    if not kv.prefix_caching:
        raise ConfigError(
            "kv_host_memory, kv_disk_path and kv_push_to keep what the prefix cache knows, and that is off: leave "
            "enable_prefix_caching and batching as they are, or leave these out"
        )
    bell = ThreadBell()
    kind, summed = checksum()
    namespace = Namespace(weights, memory.form, kv.block_size, kind)
    tiers: list[Tier] = []
    lines: list[str] = []
    try:
        if config.kv_host_memory is not None:
            host = _host(config, config.kv_host_memory, memory, summed, bell)
            tiers.append(Tier(host))
            tokens = host.slots.count * kv.block_size
            lines.append(f"kv in host   {_size(host.slots.count * memory.block_bytes)}, {tokens:,} tokens")
            if config.kv_listen is not None:
                lines.append(f"kv listens   {_listen(config, config.kv_listen, host, namespace)}")
        if config.kv_disk_path is not None:
            disk = open_disk(config.kv_disk_path, config.kv_disk_bytes, namespace, memory, summed, bell)
            tiers.append(Tier(disk, on_second_use=config.kv_host_memory is not None))
            lines.append(f"kv on disk   {disk.describe(kv.block_size)}")
        if config.kv_push_to is not None:
            address, secret = address_of(config.kv_push_to), _secret(config)
            fabric = _fabric(config)
            remote = RemoteTier(address, secret, namespace.digest, memory, summed, bell, fabric=fabric)
            tiers.append(Tier(remote))
            lines.append(f"kv pushed    to {config.kv_push_to}, every block as soon as it is computed")
    except ConfigError:
        for tier in tiers:
            tier.transport.close()
        raise
    kv.transfers = Transfers(kv, tiers, memory.block_bytes, bell, engine.clock)
    return lines


def _host(config: EngineConfig, size: int, memory: EngineMemory, summed: Checksum, bell: ThreadBell) -> HostTier:
    if size < memory.block_bytes:
        raise ConfigError(
            f"kv_host_memory is {size:,} bytes, but a block of KV takes {memory.block_bytes:,}; "
            "raise it to that or more"
        )
    there = cpu_hardware().total_bytes
    if size > there:
        raise ConfigError(
            f"kv_host_memory is {size / GIB:,.2f} GiB, but this machine has {there / GIB:,.2f} GiB of memory in all; "
            "lower it (it is in bytes)"
        )
    try:
        return HostTier(memory, size, summed, bell)
    except (OSError, RuntimeError) as error:  # of mmap, and of pinned memory
        raise ConfigError(f"kv_host_memory is {size / GIB:,.2f} GiB, which cannot be had: {error}; lower it") from None


def _fabric(config: EngineConfig) -> NixlFabric | None:
    return NixlFabric() if config.kv_transport == "nixl" else None


def _listen(config: EngineConfig, address: str, host: HostTier, namespace: Namespace) -> str:
    secret, fabric = _secret(config), _fabric(config)
    try:
        host.listener = TierListener(host, address_of(address), secret, namespace.digest, fabric)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"kv_listen is {address!r}, where nobody can listen: {error}; choose another") from None
    name, port = host.listener.address
    return f"at {name}:{port}: engines of this model that know the secret bring KV here"


def _secret(config: EngineConfig) -> bytes:
    return read_secret(config.kv_secret_file or "", "kv_secret_file")


def _size(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
