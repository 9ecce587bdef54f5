"""What an engine process tells of its inside: its books, and every block and request for those who watch."""

from __future__ import annotations

import operator
import resource
import sys
from pathlib import Path

from tokenmill.engine.core import Engine
from tokenmill.serve import wire


def stats_of(engine: Engine) -> wire.Stats:
    scheduler = engine.scheduler
    pool, cache, stats = scheduler.kv.pool, scheduler.kv.stats, scheduler.stats
    cached = sum(map(operator.gt, pool.has_content, pool.references))  # content and no reference: True > 0
    return wire.Stats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting.num_tokens,
        blocks=pool.num_blocks,
        free_blocks=pool.num_free - cached,
        cached_blocks=cached,
        block_size=scheduler.kv.block_size,
        steps=stats.steps,
        tokens=stats.tokens,
        preemptions=stats.preemptions,
        failed_steps=stats.failed_steps,
        cache_queried=cache.queried,
        cache_hit=cache.hit,
        evicted_blocks=cache.evicted_blocks,
        memory=_resident_bytes(),
        device_memory=_device_bytes(),
    )


def view_of(engine: Engine) -> wire.View:
    scheduler = engine.scheduler
    pool = scheduler.kv.pool
    blocks = bytes(
        (wire.SHARED if held > 1 else wire.USED) if held else (wire.CACHED if has else wire.FREE)
        for held, has in zip(pool.references, pool.has_content)
    )
    rows = [
        wire.RowView(
            key=int(request.id),
            running=request.row >= 0,
            prompt=request.prompt_len,
            output=request.num_output,
            computed=request.num_computed,
            blocks=len(request.blocks),
            cached=request.metrics.cached_tokens,
            priority=request.priority,
        )
        for request in scheduler.requests.values()
    ]
    return wire.View(blocks, rows)


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
