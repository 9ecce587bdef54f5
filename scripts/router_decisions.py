"""How long a decision of the cache-aware router takes, by replicas and prompt, and the memory of its index."""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from dataclasses import dataclass

from tokenmill.kv.prefix import IdentityChains
from tokenmill.routing.cache_view import CacheSnapshot
from tokenmill.routing.routers import Ask, CacheAware

BLOCK = 16


@dataclass
class Replica:
    number: int
    load: float
    open: bool = True
    seconds_per_token: float = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--identities", type=int, default=100_000, help="that each replica holds")
    parser.add_argument("--repeats", type=int, default=2000)
    asked = parser.parse_args()
    print(f"{'replicas':>8} {'prompt':>8} {'us/decision':>12} {'MB of index':>12}")
    for replicas in (2, 10, 100):
        tracemalloc.start()
        router, source = CacheAware(block_size=BLOCK), random.Random(0)
        shared = chain([source.randrange(1 << 17) for _ in range(32_768)])
        for number in range(replicas):
            own = [source.randbytes(16) for _ in range(asked.identities // (1 if replicas < 100 else 10))]
            held = shared[: len(shared) * (number + 1) // replicas]  # the walk along a prompt ends nowhere early
            router.view(number).reset(CacheSnapshot(1, 0, (*held, *own)))
        size = tracemalloc.get_traced_memory()[0] / 1e6
        tracemalloc.stop()
        for tokens in (1024, 8192, 32_768):
            ask = Ask(tokens, shared[: tokens // BLOCK])
            views = [Replica(number, source.random()) for number in range(replicas)]
            times = []
            for _ in range(asked.repeats * 1024 // tokens):
                began = time.perf_counter()
                router.choose(ask, views)
                times.append(time.perf_counter() - began)
            print(f"{replicas:8} {tokens:8} {1e6 * sorted(times)[len(times) // 2]:12.1f} {size:12.1f}")


def chain(tokens: list[int]) -> list[bytes]:
    found: list[bytes] = []
    IdentityChains(BLOCK).extend(found, "", tokens, len(tokens) // BLOCK)
    return found


if __name__ == "__main__":
    main()
