"""ReadRecords: how much of each request a drafter with keys and values of its own has read, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.engine.request import Request


@dataclass
class Record:
    """Of a running request."""

    salt: str
    life: int  # how often it had been preempted: then its blocks are others
    known: int = 0  # leading tokens whose keys and values are there
    marked: int = 0  # leading blocks of which others may know
    drafted: list[int] = field(default_factory=list)  # behind what is known the drafter computed these, which may hold


class ReadRecords:
    """The drafter's keys and values lie in the blocks that the request has anyway.

    What is recorded wrongly costs drafts, and no answer.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._records: dict[str, Record] = {}
        # block -> identity of the tokens whose keys and values are there, and whose they are
        self._filled: dict[int, tuple[bytes, str]] = {}

    def of(self, request: Request) -> Record:
        record, life = self._records.get(request.id), request.metrics.preemptions
        if record is None or record.life != life:
            record = self._records[request.id] = Record(request.salt, life)
        return record

    def find(self, request: Request) -> Record | None:
        """The record, if the request is still what was read."""
        record = self._records.get(request.id)
        return record if record is not None and record.life == request.metrics.preemptions else None

    def known(self, request: Request) -> int:
        """Leading tokens whose keys and values are there."""
        record = self.of(request)
        known = record.known
        for token, drafted in zip(request.tokens[known:] if record.drafted else (), record.drafted):
            if token != drafted:
                break
            known += 1
        whole = known // self._block_size  # what others computed of the same beginning
        most = min(len(request.identities), len(request.blocks))
        while whole < most and self._filled.get(request.blocks[whole], (b"",))[0] == request.identities[whole]:
            whole += 1
            known = max(known, whole * self._block_size)
        return known

    def note(self, request: Request, known: int) -> None:
        """So many leading tokens are being computed, and perhaps more behind them."""
        record = self.of(request)
        record.known, record.drafted = known, []
        whole = min(known // self._block_size, len(request.identities))
        for index in range(record.marked, len(request.blocks)):
            if index < whole:
                self._filled[request.blocks[index]] = request.identities[index], request.salt
            else:  # not for others, whatever was there before
                self._filled.pop(request.blocks[index], None)
        record.marked = max(record.marked, whole)

    def ended(self, request: Request) -> None:
        self._records.pop(request.id, None)

    def forget(self, salt: str | None = None) -> None:
        self._records = {name: one for name, one in self._records.items() if salt is not None and one.salt != salt}
        self._filled = {block: one for block, one in self._filled.items() if salt is not None and one[1] != salt}
