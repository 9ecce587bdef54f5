"""DiskFeed: threads read the layers that are computed next while a CPU computes this one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.errors import StepFailed
from tokenmill.offload.feed import FeedStats
from tokenmill.offload.layer_file import LayerFile
from tokenmill.offload.rotation import Rotation
from tokenmill.ops.native import recording
from tokenmill.ops.native.layer_wait import enter_layer, fence

READERS = 4  # threads: as many pieces are asked of the disk at once
COMPUTED, STALLS, STALL_NS = range(3)  # what the thread that computes tells (kernels/stream.cpp)
AWAY, THERE, FAILED = 0, 1, -1


class DiskFeed:
    """One thread sees which layer is computed and has the next ones read, in pieces, by READERS others.

    A buffer is written only when the layer in it is neither computed nor wanted. That is seen twice: before its layer
    is marked as away, and again behind that. So whoever comes back to it in between is either seen, or waits.
    """

    def __init__(
        self,
        file: LayerFile,
        rotation: Rotation,
        buffers: list[torch.Tensor],
        layers: int,
        bandwidth: float = 0.0,  # bytes per second that the file has been read at
    ) -> None:
        self.file, self.bandwidth, self.place = file, bandwidth, str(file.path.parent)
        self._told = np.zeros(3, dtype=np.int64)
        self._there = np.zeros(layers, dtype=np.int64)
        listen, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._worker = _Worker(file, rotation, buffers, self._told, self._there)
        self._streamed = set(rotation.layers)
        thread = threading.Thread(target=self._worker.run, args=(listen,), name="layers", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _stop, self._bell, thread)
        self._ring()  # the first layers

    def enter(self, layer: int) -> None:
        streamed = layer in self._streamed
        if recording.is_recording():
            enter_layer(self._told, self._there[layer:] if streamed else None, layer, self._bell)
            recording.explain_with(self._check)
            return
        self._told[COMPUTED] = layer
        self._ring()
        if not streamed:
            return
        if self._there[layer] != THERE:
            began = time.perf_counter_ns()
            with self._worker.changed:
                self._worker.changed.wait_for(lambda: self._there[layer] != AWAY)
            self._told[STALLS] += 1
            self._told[STALL_NS] += time.perf_counter_ns() - began
        self._check()

    def stats(self) -> FeedStats:
        worker, told = self._worker, self._told
        seconds = float(told[STALL_NS]) / 1e9
        return FeedStats(worker.nbytes, worker.layers, int(told[STALLS]), seconds, worker.seconds)

    def close(self) -> None:
        self._close()

    def _check(self) -> None:
        """Say why a layer could not be had, once: the next pass asks for it again."""
        layer = int(self._told[COMPUTED])
        with self._worker.changed:
            if self._there[layer] == FAILED:
                self._there[layer] = AWAY
                raise StepFailed(self._worker.why.pop(layer, f"layer {layer} cannot be read"))

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has rung often enough
            os.write(self._bell, b"\1")


class _Worker:
    """The thread's side, which must not keep the feed alive."""

    def __init__(
        self,
        file: LayerFile,
        rotation: Rotation,
        buffers: list[torch.Tensor],
        told: npt.NDArray[np.int64],
        there: npt.NDArray[np.int64],
    ) -> None:
        self._file, self._rotation, self._buffers = file, rotation, buffers
        self._told, self._there = told, there
        self._holds: dict[int, int] = {}  # buffer -> layer
        self.changed = threading.Condition()
        self.why: dict[int, str] = {}
        self.nbytes, self.layers, self.seconds = 0, 0, 0.0

    def run(self, listen: int) -> None:
        with ThreadPoolExecutor(READERS, thread_name_prefix="layer-reader") as readers:
            while os.read(listen, 4096)[-1:] == b"\1":
                while (layer := self._next()) is not None:
                    self._bring(layer, readers)
        os.close(listen)
        self._file.close()

    def _next(self) -> int | None:
        """The first wanted layer that is neither there nor known to fail, its buffer given to it."""
        with self.changed:
            for layer in self._rotation.wanted(int(self._told[COMPUTED])):
                buffer = self._rotation.buffer_of[layer]
                if self._there[layer] != AWAY:
                    continue
                before = self._holds.get(buffer)
                if before is not None and before != layer:
                    self._there[before] = AWAY
                    fence()  # the next line must not be read before that is written
                    computed = int(self._told[COMPUTED])
                    if before in self._rotation.wanted(computed):  # somebody came back to it
                        self._there[before] = THERE
                        return self._next()
                self._holds[buffer] = layer
                return layer
        return None

    def _bring(self, layer: int, readers: ThreadPoolExecutor) -> None:
        began = time.perf_counter()
        into, pieces = self._buffers[self._rotation.buffer_of[layer]], range(self._file.entries[layer].pieces)
        try:
            self.nbytes += sum(readers.map(partial(self._piece, layer, into), pieces))
            state = THERE
            self.layers += 1
        except StepFailed as error:
            state = FAILED
            self.why[layer] = str(error)
        except Exception as error:  # whatever it is, somebody may be waiting
            state = FAILED
            self.why[layer] = f"layer {layer} cannot be read: {error!r}"
        self.seconds += time.perf_counter() - began
        with self.changed:
            self._there[layer] = state
            self.changed.notify_all()

    def _piece(self, layer: int, into: torch.Tensor, piece: int) -> int:
        return self._file.read(layer, piece, into)


def _stop(bell: int, thread: threading.Thread) -> None:
    os.close(bell)  # whoever reads finds the end
    if thread is not threading.current_thread():
        thread.join(timeout=10)
