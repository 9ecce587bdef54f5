"""TextPool: what is done with a client's texts, in threads, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHORT = 1024  # characters: done at once, which takes less than to get a thread going
LONG = 65_536  # characters: of these only a few are worked on at a time, and nobody else queues behind them
THREADS = 2


class TextPool:
    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(THREADS, "tokenmill-texts")  # started when they are needed

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What `work` returns for texts of so many characters."""
        if size <= SHORT:
            return work(*args, **options)
        pool = self._long if size > LONG else None
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **options))

    def close(self) -> None:
        self._long.shutdown(wait=False, cancel_futures=True)


def size_of(prompt: Any) -> int:
    """Roughly how many characters a prompt has; token ids take far less time than these."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(map(size_of, prompt.values()))
    return len(prompt) // 16 if isinstance(prompt, Sequence) else 0
