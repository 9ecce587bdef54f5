"""AdapterStore: adapters on disk and in the host's memory, which has a bound, and a thread that reads them."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.model.adapters.peft import AdapterWeights, Base, read_adapter

Then = Callable[[str | None, str | None], None]  # told a key, or why there is none
_MIB = 1 << 20


class AdapterStore:
    """The engine's thread calls it; files are read by its own thread, or where `read` is called."""

    def __init__(
        self,
        base: Base,
        write: Callable[[int, AdapterWeights], None],  # into a slot
        host_bytes: int,
        pins: bool = False,  # for a GPU, which copies from pinned memory without anybody waiting
        most: int | None = None,  # bytes of one, where it has to be sent to other machines
    ) -> None:
        self._base, self._write, self._host_bytes, self._pins, self._most = base, write, host_bytes, pins, most
        self._paths: dict[str, Path] = {}
        self._host: OrderedDict[str, AdapterWeights] = OrderedDict()  # least recently used first
        self.host_used = 0  # bytes
        self._sizes: dict[str, int] = {}
        self._reading: set[str] = set()  # keys
        self._wanted: set[str] = set()  # keys that stay in the host's memory, or have room there when they arrive
        self.opening = 0  # folders that are read for the first time
        self._orders: queue.SimpleQueue[tuple[Path, str | None, Then | None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, path: Path) -> str:
        """Read an adapter now, and keep it; returns its key. Raises InvalidRequest."""
        return self._keep(path, self._read(path))

    def open_later(self, path: Path, then: Then) -> None:
        """The same by the other thread; `then` is called by `arrived`."""
        self.opening += 1
        self._order((path, None, then))

    # -- AdapterSource ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._reading or self.opening)

    def bring(self, key: str) -> bool:
        fits = sum(self._sizes[one] for one in self._wanted | {key}) <= self._host_bytes
        if fits:
            self._wanted.add(key)
        if key in self._host:
            return True
        if fits and key not in self._reading:
            self._reading.add(key)
            self._order((self._paths[key], key, None))
        return False

    def arrived(self) -> list[tuple[str, str | None]]:
        found: list[tuple[str, str | None]] = []
        self._bell.clear()
        while True:
            try:
                read = self._done.get_nowait()
            except queue.Empty:
                self._wanted = {one for one in self._wanted if one in self._reading}
                return found
            key, error = read.key, read.error
            if key is not None and key not in self._paths:  # nobody wants it any more
                self._reading.discard(key)
                continue
            if read.weights is not None and key in (None, read.weights.key):
                try:
                    self._keep(read.path, read.weights)
                except InvalidRequest as problem:
                    error = str(problem)
            elif error is None:
                error = f"the adapter in {str(read.path)!r} has changed since it was loaded; load it again"
            if read.then is not None:
                self.opening -= 1
                read.then(None if error or read.weights is None else read.weights.key, error)
            if key is not None:
                self._reading.discard(key)
                found.append((key, error))

    def place(self, key: str, slot: int) -> None:
        self._host.move_to_end(key)
        self._write(slot, self._host[key])

    def drop(self, key: str) -> None:
        self._paths.pop(key, None)
        self._sizes.pop(key, None)
        self._wanted.discard(key)
        if (weights := self._host.pop(key, None)) is not None:
            self.host_used -= weights.nbytes

    def wait(self, seconds: float) -> None:
        if self.busy:
            self._bell.wait(seconds)

    def close(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()

    # -- inside -----------------------------------------------------------------------------------------------

    def _keep(self, path: Path, weights: AdapterWeights) -> str:
        key, size = weights.key, weights.nbytes
        if size > self._host_bytes:
            raise InvalidRequest(
                f"the adapter in {str(path)!r} takes {size / _MIB:.1f} MiB, but lora_host_memory is "
                f"{self._host_bytes / _MIB:.1f} MiB; raise that"
            )
        if self._most is not None and size > self._most:
            raise InvalidRequest(
                f"the adapter in {str(path)!r} takes {size / _MIB:.1f} MiB, but ranks on other machines are sent "
                f"{self._most / _MIB:.1f} MiB at most; use one of a smaller rank"
            )
        self._paths[key], self._sizes[key] = path, size
        if key in self._host:
            self._host.move_to_end(key)
            return key
        for other in [one for one in self._host if one not in self._wanted]:  # the least recently used first
            if self.host_used + size <= self._host_bytes:
                break
            self.host_used -= self._host.pop(other).nbytes
        if self.host_used + size <= self._host_bytes:
            self._host[key] = weights
            self.host_used += size
        return key

    def _read(self, path: Path) -> AdapterWeights:
        weights = read_adapter(path, self._base)
        return weights.pinned() if self._pins else weights

    def _order(self, order: tuple[Path, str | None, Then | None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="tokenmill-adapters", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def _loop(self) -> None:
        while (order := self._orders.get()) is not None:
            path, key, then = order
            read = _Read(path, key, then)
            try:
                read.weights = self._read(path)
            except TokenmillError as error:
                read.error = str(error)
            except Exception as error:  # whoever waits must hear of it, whatever it was
                read.error = f"the adapter in {str(path)!r} cannot be read: {type(error).__name__}: {error}"
            self._done.put(read)
            self._bell.set()


class _Read:
    """An order that was carried out."""

    def __init__(self, path: Path, key: str | None, then: Then | None) -> None:
        self.path, self.key, self.then = path, key, then
        self.weights: AdapterWeights | None = None
        self.error: str | None = None
