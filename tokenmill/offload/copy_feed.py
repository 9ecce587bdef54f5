"""CopyFeed: a stream of its own copies the layers that are computed next to the GPU while this one is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from tokenmill.offload.feed import FeedStats
from tokenmill.offload.rotation import Rotation


class Streams(Protocol):
    """The stream that computes and the one that copies. Tests stand in for both."""

    def host_memory(self, nbytes: int) -> torch.Tensor:  # [nbytes] uint8
        """What copies can be made of while the host goes on."""
        ...

    def computed(self) -> Any:
        """An event behind all that has been launched so far."""
        ...

    def copy(self, into: torch.Tensor, source: torch.Tensor, after: Any | None) -> Any:
        """Copy behind that event; returns an event behind the copy."""
        ...

    def compute_after(self, event: Any) -> None:
        """What is launched from now on waits for it."""
        ...


class CudaStreams:
    """Nothing here waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def computed(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, into: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            into.copy_(source, non_blocking=True)
            done.record(self._copies)
        return done

    def compute_after(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class CopyFeed:
    """A buffer is copied to behind all that was launched on its last layer; a layer is computed behind its copy."""

    bandwidth, place = 0.0, "pinned memory of the host"

    def __init__(
        self, homes: Mapping[int, torch.Tensor], rotation: Rotation, buffers: list[torch.Tensor], streams: Streams
    ) -> None:
        """homes: the layers in the host's memory, as they are to lie in the buffers."""
        self._homes, self._rotation, self._buffers, self._streams = homes, rotation, buffers, streams
        self._holds: dict[int, int] = {}  # buffer -> layer
        self._there: dict[int, Any] = {}  # buffer -> event behind its copy
        self._bytes, self._copies = 0, 0

    def enter(self, layer: int) -> None:
        launched = None
        for wanted in self._rotation.wanted(layer):
            buffer = self._rotation.buffer_of[wanted]
            if self._holds.get(buffer) == wanted:
                continue
            launched = launched or self._streams.computed()
            home = self._homes[wanted]
            self._there[buffer] = self._streams.copy(self._buffers[buffer][: len(home)], home, launched)
            self._holds[buffer] = wanted
            self._bytes += len(home)
            self._copies += 1
        if layer in self._rotation.buffer_of:
            self._streams.compute_after(self._there[self._rotation.buffer_of[layer]])

    def stats(self) -> FeedStats:
        return FeedStats(self._bytes, self._copies)

    def close(self) -> None:
        pass
