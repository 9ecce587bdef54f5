"""Hardware: what a plan needs to know of the machine, as plain data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    device: str  # cpu or cuda
    name: str
    total_bytes: int
    free_bytes: int


def cpu_hardware() -> Hardware:
    """This machine's memory, within the limits of the container it may run in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 * GIB
    free = _meminfo("MemAvailable") or total // 2
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    if limit is not None and limit < total:
        used = _cgroup("memory.current", "memory/memory.usage_in_bytes") or 0
        total, free = limit, min(free, max(limit - used, 0))
    return Hardware("cpu", f"{os.cpu_count()} cores", total, free)


def _meminfo(name: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup(*names: str) -> int | None:
    for name in names:
        try:
            return int(Path("/sys/fs/cgroup", name).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
    return None
