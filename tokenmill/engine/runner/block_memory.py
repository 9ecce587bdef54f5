"""ArenaMemory: the blocks of a device's arenas as bytes, for transports."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.kv.transport import BlockMemory

STAGED = 64 << 20  # bytes of the piece that a GPU gathers blocks in

Bytes = npt.NDArray[np.uint8]


class EngineMemory(BlockMemory, Protocol):
    """Of one rank, or of all that have some heads each."""

    form: str  # dtypes and shapes of a block of the whole model


class ArenaMemory:
    """A block is all layers' keys and values of its tokens, their scales, and what other models keep beside them.

    On a CPU a copy is memory to memory. On a GPU blocks are gathered in one piece, on a stream of its own, and brought
    to the host from there, and the other way round: fragments of layers would cross the bus at a tenth of its speed.
    Whoever asks waits for the copy, so it is asked by threads; what is launched meanwhile does not.
    """

    def __init__(self, state: DeviceState) -> None:
        self._arenas = list(_arenas(state))
        self.device = state.arena.device
        self._sizes = [_block_bytes(arena) for arena in self._arenas]
        self.block_bytes = sum(self._sizes)
        self.form = ";".join(f"{arena.dtype}:{[*arena.shape[:2], *arena.shape[3:]]}" for arena in self._arenas)
        self._views: list[Bytes] = []  # [blocks, layers, parts, block_size, kv_heads, bytes]
        if self.device.type == "cpu":
            self._views = [arena.view(torch.uint8).movedim(2, 0).numpy() for arena in self._arenas]
        else:
            self._lock = threading.Lock()
            with torch.cuda.device(self.device):
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            rows = max(1, STAGED // self.block_bytes)
            self._staging = torch.empty(rows, self.block_bytes, dtype=torch.uint8, device=self.device)

    def allocate(self, size: int) -> memoryview:
        if self.device.type == "cpu":
            return memoryview(mmap.mmap(-1, max(size, 1)))[:size]  # taken from the system as it is first written
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found: memoryview = pinned.numpy().data
        return found

    def gather(self, blocks: Sequence[int], targets: Sequence[memoryview]) -> None:
        if self.device.type != "cpu":
            self._stage(blocks, targets, out=True)
            return
        for block, target in zip(blocks, targets, strict=True):
            for view, part in self._parts(target):
                np.copyto(part.reshape(view.shape[1:]), view[block])

    def scatter(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        if self.device.type != "cpu":
            self._stage(blocks, sources, out=False)
            return
        for block, source in zip(blocks, sources, strict=True):
            for view, part in self._parts(source):
                np.copyto(view[block], part.reshape(view.shape[1:]))

    def _parts(self, payload: memoryview) -> Iterator[tuple[Bytes, Bytes]]:
        whole, at = np.frombuffer(payload, dtype=np.uint8), 0
        for view, size in zip(self._views, self._sizes, strict=True):
            yield view, whole[at : at + size]
            at += size

    def _stage(self, blocks: Sequence[int], host: Sequence[memoryview], out: bool) -> None:
        rows = len(self._staging)
        with self._lock, torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for at in range(0, len(blocks), rows):
                some = torch.tensor(blocks[at : at + rows]).pin_memory().to(self.device, non_blocking=True)
                theirs = [torch.frombuffer(one, dtype=torch.uint8) for one in host[at : at + rows]]
                if out:
                    self._copy_staged(some, out)
                    for ours, their in zip(self._staging, theirs):
                        their.copy_(ours, non_blocking=True)
                else:
                    for ours, their in zip(self._staging, theirs):
                        ours.copy_(their, non_blocking=True)
                    self._copy_staged(some, out)
                self._stream.synchronize()

    def _copy_staged(self, blocks: torch.Tensor, out: bool) -> None:
        """Between the arenas and the rows of the staging piece."""
        at, count = 0, len(blocks)
        for arena, size in zip(self._arenas, self._sizes, strict=True):
            part = self._staging[:count, at : at + size]  # [blocks, bytes]
            raw = arena.view(torch.uint8)
            shape = (count, *raw.shape[:2], *raw.shape[3:])
            if out:
                part.copy_(raw.index_select(2, blocks).movedim(2, 0).reshape(count, size))
            else:
                raw.index_copy_(2, blocks, part.reshape(shape).movedim(0, 2))
            at += size


def _arenas(state: DeviceState) -> Iterator[torch.Tensor]:
    yield state.arena
    if state.scales is not None:
        yield state.scales
    for other in state.beside:
        yield from _arenas(other)


def _block_bytes(arena: torch.Tensor) -> int:
    return arena.numel() // arena.shape[2] * arena.element_size()
