"""Capture: CUDA graphs that share one pool of memory, recorded on a stream of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_WORDS = {2: "<i2", 4: "<i4", 8: "<i8"}  # by bytes of an element


class Capture:
    """Work between `begin` and `end` is recorded instead of done; all of it lies within `recording`.

    Recordings of one pool may use the same memory: they are replayed one after the other, on one stream, and those of
    several pieces in the order in which they were made.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None  # under way
        self.renew()

    def renew(self) -> None:
        """Take another pool: one goes with the last recording that uses it, and cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    if self._graph is not None:  # something went wrong, and that is what is to be told
                        with contextlib.suppress(RuntimeError):
                            self.end()
        finally:
            current.wait_stream(self._stream)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:  # of the same shape
        """The same memory, which others may use again: what replays leave there is read before that."""
        return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class _Memory:
    """A tensor's memory, described as other libraries describe theirs: torch does not own it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": _WORDS[size],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
