"""The prepared layers of a model: a file of images, written once, whose every piece is read past the page cache.

A checkpoint cannot be streamed as it is: what is computed with is fused and packed into panels, which takes far longer
than reading. So all layers are written once in the form that they are multiplied in, each on pages of its own: which of
them are resident may be another choice at every start. The index is written last; a folder without it is no file.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tokenmill.cache import ELSEWHERE, kept_in
from tokenmill.errors import ModelError, StepFailed
from tokenmill.model.layers import Weight
from tokenmill.offload.image import Image, Part, image_of, write_image
from tokenmill.ops.native.checksum import checksum
from tokenmill.plan.solve.offload import PAGE

PIECE = 1 << 20  # bytes that are read at once and have a checksum
VERSION = 1
_DATA, _INDEX = "layers.bin", "index.json"

WHAT = "a model's layers, which do not fit into memory,"


@dataclass(frozen=True)
class Entry:
    """Where a layer lies, and what its pieces add up to."""

    at: int
    image: Image
    sums: tuple[int, ...]

    @property
    def pieces(self) -> int:
        return len(self.sums)


def room(nbytes: int) -> torch.Tensor:  # [nbytes] uint8
    """Memory on whole pages, large ones where the system has them."""
    memory = mmap.mmap(-1, max(PAGE, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class LayerFile:
    """An open file of layers. `read` may be called by many threads."""

    def __init__(self, folder: Path, name: Callable[[int], str] = "layer {}".format) -> None:
        """name: what an entry is called: a layer, or an expert of one."""
        self.path = folder / _DATA
        self._entry_name = name
        algorithm, self._checksum = checksum()
        try:
            index = json.loads((folder / _INDEX).read_text())
            self.entries = tuple(_entry(one) for one in index["layers"])
            known = index["version"] == VERSION and index["checksum"] == algorithm and index["piece"] == PIECE
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{folder / _INDEX} cannot be read ({error}); remove the folder, and it is made again"
            ) from None
        if not known:
            raise ModelError(f"{folder} was made by another release; remove the folder, and it is made again")
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self.file = os.open(self.path, flags | getattr(os, "O_DIRECT", 0))
            self.direct = hasattr(os, "O_DIRECT")
        except OSError:  # a filesystem that knows no O_DIRECT, or no file, which the next line says
            with _told(self.path):
                self.file, self.direct = os.open(self.path, flags), False

    def read(self, layer: int, piece: int, into: torch.Tensor) -> int:  # [at least the layer's bytes] uint8
        """Bring a piece of a layer, and see that it is what was written. StepFailed: it is not. Returns its bytes."""
        entry, name = self.entries[layer], self._entry_name(layer)
        first = piece * PIECE
        size = min(PIECE, entry.image.nbytes - first)
        view = memoryview(into[first : first + size].numpy())  # type: ignore[arg-type]
        done = 0
        try:
            while done < size:
                count = os.preadv(self.file, [view[done:]], entry.at + first + done)
                if not count:
                    break
                done += count
            if not self.direct and hasattr(os, "posix_fadvise"):  # what is streamed must not push out what is kept
                os.posix_fadvise(self.file, entry.at + first, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StepFailed(f"{name} cannot be read from {self.path}: {error.strerror or error}") from None
        if done < size:
            raise StepFailed(f"{name} cannot be read: {self.path} has been cut short; remove its folder and restart")
        if self._checksum(view) != entry.sums[piece]:
            raise StepFailed(
                f"{name} is not what was written to {self.path}: the file has been changed, or its disk is "
                "failing; remove its folder and restart"
            )
        return size

    def read_whole(self, layer: int, into: torch.Tensor) -> None:
        for piece in range(self.entries[layer].pieces):
            self.read(layer, piece, into)

    def close(self) -> None:
        os.close(self.file)


def is_prepared(folder: Path) -> bool:
    return (folder / _INDEX).is_file()


def prepare(
    folder: Path,
    layers: Iterable[Mapping[str, Weight]],  # in their order; each is forgotten when it has been written
    nbytes: int,  # about, of all
) -> None:
    """Write the file. Whoever else does so at the same time has the same, and the first one's is kept."""
    with kept_in(folder.parent, WHAT):
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    if free < nbytes:
        raise ModelError(
            f"a model whose layers do not all fit into memory is written to disk once more, {nbytes:,} bytes, and "
            f"{folder.parent} has {free:,}; make room there, or {ELSEWHERE}"
        )
    name, add_up = checksum()
    with kept_in(folder.parent, WHAT):
        part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
    try:
        entries: list[Entry] = []
        with (part / _DATA).open("wb") as file:
            at = 0
            for weights in layers:
                image = image_of(weights)
                memory = room(image.nbytes)
                write_image(weights, image, memory)
                del weights
                view = memoryview(memory.numpy())  # type: ignore[arg-type]
                sums = [add_up(view[first : first + PIECE]) for first in range(0, image.nbytes, PIECE)]
                with kept_in(folder.parent, WHAT):
                    file.write(view)
                    if at // (64 * PIECE) != (at + image.nbytes) // (64 * PIECE):
                        _to_disk(file.fileno())
                entries.append(Entry(at, image, tuple(sums)))
                at += image.nbytes
            with kept_in(folder.parent, WHAT):
                file.flush()
                _to_disk(file.fileno())
        index = {"version": VERSION, "checksum": name, "piece": PIECE, "layers": [asdict(one) for one in entries]}
        (part / _INDEX).write_text(json.dumps(index))
        with contextlib.suppress(OSError):  # somebody was faster
            os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _to_disk(file: int) -> None:
    """Written pages need not stay in memory, of which there is little."""
    os.fsync(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _entry(text: Mapping[str, object]) -> Entry:
    image: Mapping[str, object] = text["image"]  # type: ignore[assignment]
    parts = tuple(Part(**{**one, "shape": tuple(one["shape"])}) for one in image["parts"])  # type: ignore[attr-defined]
    return Entry(int(text["at"]), Image(parts, int(image["nbytes"])), tuple(text["sums"]))  # type: ignore[call-overload,arg-type]


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path} cannot be opened: {error.strerror or error}") from None
