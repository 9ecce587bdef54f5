"""Block traces: of public traces with prefix hashes, and made ones that are hard on one policy or another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

from tokenmill.errors import ConfigError
from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.replay.replay import BlockTrace


def block_trace(workload: Workload) -> BlockTrace:
    """The full blocks of every prompt: a partial one is never shared. What was answered has no hashes."""
    if workload.hash_ids is None:
        raise ConfigError(f"{workload.name} has no prefix hashes: nothing says which prompts begin alike")
    whole = [prompt // workload.hash_block for prompt in workload.prompts]
    prompts = tuple(tuple(ids[:blocks]) for ids, blocks in zip(workload.hash_ids, whole))
    return BlockTrace(workload.name, prompts, block_size=workload.hash_block)


def made_trace(name: str, seed: int = 0) -> BlockTrace:
    if name not in MADE:
        raise ConfigError(f"there is no made trace {name!r}; it may be one of {', '.join(MADE)}")
    ids = count()
    pairs = list(MADE[name](random.Random(f"{name}/{seed}"), lambda blocks: tuple(next(ids) for _ in range(blocks))))
    return BlockTrace(name, tuple(prompt for prompt, _ in pairs), tuple(answer for _, answer in pairs))


Blocks = tuple[int, ...]
Fresh = Callable[[int], Blocks]
Requests = Iterator[tuple[Blocks, Blocks]]  # blocks of the prompt, and of the answer


def _chats(
    source: random.Random, fresh: Fresh, requests: int = 6000, every: float = 0.25, prompts: int = 8
) -> Requests:
    """Conversations over a few system prompts; most end after a turn or two, and users think at their own pace."""
    systems = [fresh(source.randint(2, 12)) for _ in range(prompts)]
    waiting: list[tuple[float, int, Blocks]] = []  # when the next turn comes, its number, all that was said
    for now in range(requests):
        due = min(waiting, default=None)
        if due is not None and due[0] <= now and source.random() > every:
            waiting.remove(due)
            said = due[2]
        else:
            said = systems[min(int(source.expovariate(0.5)), prompts - 1)]
        prompt, answer = said + fresh(source.randint(1, 4)), fresh(source.randint(0, 2))
        yield prompt, answer
        if source.random() < 0.6 and len(prompt) < 100:
            waiting.append((now + source.lognormvariate(4.0, 1.0), now, prompt + answer))


def _agents(source: random.Random, fresh: Fresh, runs: int = 240, at_once: int = 12) -> Requests:
    """Loops of agents over one long set of tools: each call repeats all before it and adds a result, quickly."""
    tools = fresh(16)
    running: list[list[object]] = []
    started = 0
    while running or started < runs:
        while len(running) < at_once and started < runs:
            started += 1
            running.append([tools + fresh(source.randint(1, 8)), source.randint(4, 40)])
        one = running[min(int(source.expovariate(0.4)), len(running) - 1)]
        prompt, left = one
        assert isinstance(prompt, tuple) and isinstance(left, int)
        answer = fresh(source.randint(0, 1))
        yield prompt, answer
        one[0], one[1] = prompt + answer + fresh(source.randint(1, 3)), left - 1
        if left <= 1:
            running.remove(one)


def _scans(source: random.Random, fresh: Fresh) -> Requests:
    """Chats, and now and then a batch job that reads hundreds of documents once: it flushes an LRU."""
    chats = _chats(source, fresh, requests=5000)
    for number, request in enumerate(chats):
        yield request
        if number % 500 == 499:
            task = fresh(2)
            for _ in range(150):
                yield task + fresh(source.randint(8, 24)), ()


def _recent(source: random.Random, fresh: Fresh) -> Requests:
    """What was asked last is asked again, what is old never: nothing is better than LRU."""
    seen: list[Blocks] = []
    for _ in range(6000):
        if seen and source.random() < 0.7:
            at = min(int(source.expovariate(0.08)), len(seen) - 1)
            prompt = seen.pop(-1 - at)
        else:
            prompt = fresh(source.randint(4, 16))
        seen.append(prompt)
        yield prompt, ()


def _shifts(source: random.Random, fresh: Fresh) -> Requests:
    """What is popular changes at once, over and over: all that was learned becomes wrong."""
    for phase in range(6):
        if phase % 2:
            documents = [fresh(source.randint(8, 24)) for _ in range(120)]
            for _ in range(1200):
                yield source.choice(documents) + fresh(1), ()
        else:
            yield from _chats(source, fresh, requests=1200)


def _loop(source: random.Random, fresh: Fresh) -> Requests:
    """The same documents in the same order, again and again, more than fit: an LRU finds nothing."""
    documents = [fresh(source.randint(6, 14)) for _ in range(300)]
    for _ in range(15):
        for document in documents:
            yield document + fresh(1), ()


MADE: dict[str, Callable[[random.Random, Fresh], Requests]] = {
    "chats": _chats,
    "agents": _agents,
    "scans": _scans,
    "recent": _recent,
    "shifts": _shifts,
    "loop": _loop,
}


def in_smaller_blocks(trace: BlockTrace, block_size: int) -> BlockTrace:
    """The same tokens in blocks of fewer: an engine's own are of 16, most traces' of 512."""
    if trace.block_size % block_size:
        raise ConfigError(f"blocks of {trace.block_size} tokens cannot be divided into blocks of {block_size}")
    parts = range(trace.block_size // block_size)

    def divided(rows: tuple[Blocks, ...]) -> tuple[Blocks, ...]:
        return tuple(tuple(id * len(parts) + part for id in row for part in parts) for row in rows)

    return BlockTrace(trace.name, divided(trace.prompts), divided(trace.answers), block_size)
