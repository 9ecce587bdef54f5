"""CacheLog: what a prefix index learned and forgot since somebody last looked, for routers that follow it."""

from __future__ import annotations


class CacheLog:
    """Net changes: what came and went between two looks is not told."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._evicted)

    def stored(self, identity: bytes) -> None:
        if identity in self._evicted:
            del self._evicted[identity]
        else:
            self._stored[identity] = None

    def evicted(self, identity: bytes) -> None:
        if identity in self._stored:
            del self._stored[identity]
        else:
            self._evicted[identity] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """What is there now and was not at the last look, and what was there and is not now."""
        changes = list(self._stored), list(self._evicted)
        self._stored, self._evicted = {}, {}
        return changes
