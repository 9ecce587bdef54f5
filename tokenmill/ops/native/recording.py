"""Recording: native ops put into a graph instead of being computed, so that a whole step is replayed by one call.

A graph is recorded once, on buffers that have room for the largest step, and replayed for any number of rows up to
that. Whatever changes from step to step is read through pointers; everything else is fixed when it is recorded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill.ops.native.library import Library, library

_ALIGNMENT = 64  # bytes of a cache line, and of the widest vector


class NotRecordableError(RuntimeError):
    """The step computes something that a graph cannot hold; the message says what."""


def new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialized tensor for the result of a native op: in the graph's own memory while one is recorded."""
    buffers = _recording.get()
    return torch.empty(shape, dtype=dtype) if buffers is None else buffers.take(shape, dtype)


def row_count(rows: int) -> int:
    """How args say that a tensor has so many rows: while recording, minus how many there are per row of the step."""
    buffers = _recording.get()
    if buffers is None:
        return rows
    if rows % buffers.capacity:
        raise NotRecordableError(f"{rows} rows are no multiple of the {buffers.capacity} rows being recorded")
    return -(rows // buffers.capacity)


def is_recording() -> bool:
    return _recording.get() is not None


def explain_with(explain: Callable[[], None]) -> None:
    """Have a run of the graph that is recorded ask this, where it was void: it raises what it knows of that."""
    buffers = _recording.get()
    assert buffers is not None
    if explain not in buffers.explain:
        buffers.explain.append(explain)


class RecordedGraph:
    """A recorded step. It owns the memory between its ops; what they read and write at both ends is the caller's."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._library: Library = library()
        self._buffers = Buffers(capacity)
        self._graph: int | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Native ops called inside are put into the graph, with tensors of `capacity` rows; nothing is computed."""
        c = self._library.c
        assert self._graph is None
        self._graph = c.tm_graph_begin(self.capacity)
        if not self._graph:
            raise MemoryError("no memory for a graph")
        weakref.finalize(self, c.tm_graph_free, self._graph).atexit = False
        token = _recording.set(self._buffers)
        try:
            with _Watch():  # type: ignore[no-untyped-call]
                yield
        finally:
            _recording.reset(token)
            c.tm_graph_end()

    def run(self, rows: int) -> None:
        """Compute the step for the first `rows` rows of its inputs. PeerLostError: a rank that it needs is gone."""
        said = self._library.c.tm_graph_run(self._graph, rows)
        for explain in self._buffers.explain if said == 2 else ():
            explain()
        if said == 1:
            raise RuntimeError(f"a graph of {self.capacity} rows cannot run {rows}, or was made for another CPU level")
        self._library.check_peers(said)

    def __len__(self) -> int:
        return int(self._library.c.tm_graph_length(self._graph))

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes


class Buffers:
    """Memory for the results of recorded ops, used again as soon as nothing refers to a result any more.

    That is right because the graph is replayed in the order of the recording: whoever reuses a buffer comes later.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self.explain: list[Callable[[], None]] = []
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = max(1, math.prod(shape)) * dtype.itemsize
        fitting = [i for i, block in enumerate(self._free) if size <= len(block) <= 2 * size]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        else:
            block = _aligned(-(-size // _ALIGNMENT) * _ALIGNMENT)
            self.nbytes += len(block)
        view = block[:size]  # lives exactly as long as any tensor on it does
        name = id(view)
        self._lent[name] = weakref.ref(view, lambda _: self._give_back(name)), block
        return torch.from_numpy(view).view(dtype)[: math.prod(shape)].view(shape)

    def _give_back(self, name: int) -> None:
        self._free.append(self._lent.pop(name)[1])


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses torch computations while a graph is recorded: a replay would not repeat them. Views are harmless."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the shield from the compiler would import it: 90 MB and most of a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        made = [x.untyped_storage().data_ptr() for x in _tensors(result)]
        if func._schema.is_mutable or any(storage not in given for storage in made):
            raise NotRecordableError(f"{func} is not a native op")
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _tensors(one)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    skip = -memory.ctypes.data % _ALIGNMENT
    return memory[skip : skip + size]


_recording: ContextVar[Buffers | None] = ContextVar("recording", default=None)
