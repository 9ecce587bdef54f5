"""Runs something on several ranks that are threads of this process, and gives back what each of them returned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenmill.parallel.communicator import Communicator
from tokenmill.parallel.threads import ThreadCommunicator, thread_communicators

Result = TypeVar("Result")


def on_ranks(size: int, run: Callable[[Communicator], Result]) -> list[Result]:
    """A rank that fails takes the others with it, and its error is raised here."""
    ranks = thread_communicators(size)

    def one(rank: ThreadCommunicator) -> Result:
        try:
            return run(rank)
        except BaseException:
            rank.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, rank) for rank in ranks]
        failed = [error for one in running if (error := one.exception()) is not None]
        if failed:
            raise next((error for error in failed if type(error).__name__ != "PeerLostError"), failed[0])
        return [one.result() for one in running]
