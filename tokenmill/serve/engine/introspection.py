"""What an engine process reports of itself: its stats, and a snapshot of every block and request."""

from __future__ import annotations

import operator
import resource
import sys
from itertools import repeat
from pathlib import Path

from tokenmill.engine.adapters import AdapterPool
from tokenmill.engine.core import Engine
from tokenmill.kv.manager import KVManager
from tokenmill.kv.pool import BlockPool
from tokenmill.kv.transfers import Tier
from tokenmill.serve.engine import wire


def stats_of(engine: Engine) -> wire.EngineStats:
    scheduler, stats = engine.scheduler, engine.scheduler.stats
    managers = [part.kv for part in scheduler.parts]
    transfers = scheduler.transfers
    load = getattr(engine.runner, "expert_load", None)  # a simulated engine has none
    # Content and no reference: True > 0
    cached = sum(sum(map(operator.gt, one.pool.has_content, one.pool.references)) for one in managers)
    adapters = scheduler.parts[0].life.adapters
    return wire.EngineStats(
        running=len(scheduler.running),
        blocks=sum(one.pool.num_blocks for one in managers),
        free_blocks=sum(one.pool.num_free for one in managers) - cached,
        cached_blocks=cached,
        block_size=managers[0].block_size,
        steps=stats.steps,
        preemptions=stats.preemptions,
        failed_steps=stats.failed_steps,
        cache_queried=sum(one.stats.queried for one in managers),
        cache_hit=sum(one.stats.hit for one in managers),
        evicted_blocks=sum(one.stats.evicted_blocks for one in managers),
        memory=_resident_bytes(),
        device_memory=_device_bytes(),
        late_kernels=_late_kernels(),
        drafts={
            name: (one.drafted, one.accepted, one.steps)
            for name, one in (engine.speculation.stats.items() if engine.speculation is not None else ())
        },
        eviction=_eviction_of(managers),
        tiers={} if transfers is None else {tier.transport.name: _tier(tier) for tier in transfers.tiers},
        block_bytes=0 if transfers is None else transfers.block_bytes,
        module_placed=sum(one.stats.placed for one in managers),
        swapped=0 if transfers is None else transfers.swapped,
        experts=[] if load is None else load.counts.sum(0).tolist(),
        experts_dropped=0 if load is None else int(load.dropped.sum()),
        streamed=_streamed(engine),
        adapters=_adapters_of(adapters),
        awaiting_adapters=0 if adapters is None else adapters.num_waiting,
    )


def _tier(tier: Tier) -> wire.TierReport:
    stats, (held, room) = tier.stats, tier.transport.usage()
    return wire.TierReport(
        read=stats.read,
        written=stats.written,
        failed=stats.failed + stats.unwritten,
        refused=stats.refused,
        spared=stats.spared,
        waiting=tier.waiting,
        bandwidth=tier.bandwidth,
        held=held,
        room=room,
    )


def _adapters_of(pool: AdapterPool | None) -> tuple[int, int, int, int] | None:
    return None if pool is None else (len(pool.names), pool.num_resident, pool.stats.loads, pool.stats.evictions)


def _eviction_of(managers: list[KVManager]) -> tuple[str, int, int, int] | None:
    found = [one.eviction for one in managers if one.eviction is not None]
    if not found:
        return None
    stats = [one.stats for one in found]
    shadow_hits = round(sum(one.shadow_hits for one in stats))
    return found[0].name, sum(one.hits for one in stats), shadow_hits, sum(one.takeovers for one in stats)


def _streamed(engine: Engine) -> wire.StreamedReport | None:
    if engine.feed is None:
        return None
    found, experts = engine.feed.stats(), None
    if (seen := found.experts) is not None:
        experts = wire.CachedReport(seen.slots, seen.experts, seen.hits, seen.misses, seen.foreseen, seen.wasted)
    counted = found.nbytes, found.layers, found.stalls, found.stall_seconds, found.overlap_seconds
    return wire.StreamedReport(*counted, experts)


def _late_kernels() -> int:
    launch = sys.modules.get("tokenmill.ops.triton.launch")  # where it is not loaded, nothing is launched
    return launch.FIRST_LAUNCHES.count if launch is not None else 0


def view_of(engine: Engine) -> wire.EngineSnapshot:
    scheduler, now = engine.scheduler, engine.clock()
    rows = [
        wire.SequenceSnapshot(
            key=int(request.id),
            running=request.row >= 0,
            prompt=request.prompt_len,
            output=request.num_output,
            computed=request.num_computed,
            blocks=len(request.blocks),
            cached=request.metrics.reused_tokens,
            age=now - request.arrival,
        )
        for request in scheduler.requests.values()
        if not request.is_module
    ]
    return wire.EngineSnapshot(b"".join(blocks_of(part.kv.pool) for part in scheduler.parts), rows)


# references (at most 255) -> 0, 2 or 4; that plus whether the block has content -> its state
_HELD = bytes([0, 2]) + bytes([4]) * 254
_STATE = bytes([wire.FREE, wire.CACHED, wire.USED, wire.USED, wire.SHARED, wire.SHARED]) + bytes(250)


def blocks_of(pool: BlockPool) -> bytes:
    """One byte per block. A GPU has hundreds of thousands of them, so no line of Python runs per block."""
    try:
        held = bytes(pool.references)
    except ValueError:  # a block with more than 255 holders
        held = bytes(map(min, pool.references, repeat(255)))
    # Both as one long number: no byte of the sum overflows.
    both = int.from_bytes(held.translate(_HELD)) + int.from_bytes(bytes(pool.has_content))
    return both.to_bytes(len(held)).translate(_STATE)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _device_bytes() -> int:
    torch = sys.modules.get("torch")  # a simulated engine never imports it
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())
