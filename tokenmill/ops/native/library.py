"""Finds the native library, builds it where it is missing, and loads it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenmill.cache import Chosen, Folder, cannot_keep, native_dir, temporary, writable_or_temporary
from tokenmill.errors import ConfigError, PeerLostError
from tokenmill.ops.native import build

LEVEL_NAMES = tuple(level.name for level in build.levels())

WHAT = "the native CPU library"

Tell = Callable[[int, int, str], None]  # done, in all, what


_POINTER, _SIZE, _KIND, _COUNT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # what they return, and what they take
    "tm_run": (ctypes.c_int, _KIND, _POINTER),
    "tm_args_bytes": (_KIND, _KIND),
    "tm_alloc": (_POINTER, _SIZE),
    "tm_populate": (None, _POINTER, _SIZE),
    "tm_free": (None, _POINTER, _SIZE),
    "tm_crc32c": (_KIND, _POINTER, _SIZE, ctypes.c_int),
    "tm_graph_begin": (_POINTER, _COUNT),
    "tm_graph_end": (None,),
    "tm_graph_length": (_COUNT, _POINTER),
    "tm_graph_run": (ctypes.c_int, _POINTER, _COUNT),
    "tm_graph_free": (None, _POINTER),
    "tm_group_bytes": (_KIND,),
    "tm_told_numbers": (_COUNT,),
    "tm_most": (ctypes.c_double,),
    "tm_send": (ctypes.c_int, _POINTER, _COUNT, _POINTER, _COUNT),
    "tm_receive": (ctypes.c_int, _POINTER, _COUNT, _POINTER, _COUNT),
}


class Library:
    """The loaded library: `run(kind, args)` executes one op on the pool."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note: str | None = None  # why it is kept where nobody wanted it
        self.c = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(self.c, name)
            function.argtypes, function.restype = arguments, result
        # A few cycles, for which the interpreter's lock is kept: who is behind a fence is in a hurry.
        self.fence = ctypes.PyDLL(str(path)).tm_fence
        self.fence.argtypes, self.fence.restype = (), None

    def run(self, kind: int, args: ctypes.Structure) -> None:
        said = self.c.tm_run(kind, ctypes.addressof(args))
        if said == 1:
            raise ValueError(f"the native library has no op of kind {kind}")
        self.check_peers(said)

    def check_peers(self, said: int) -> None:
        """Of what a call returned: whether the ranks it depends on were there."""
        if said == 2:
            raise PeerLostError("a rank of the group is gone")

    def check(self, kind: int, struct: type[ctypes.Structure]) -> None:
        """That both sides mean the same struct: called once where a struct is declared for use."""
        native, ours = self.c.tm_args_bytes(kind), ctypes.sizeof(struct)
        if native != ours:
            raise ValueError(f"{struct.__name__} has {ours} bytes here and {native} in the native library")

    @property
    def threads(self) -> int:
        return int(self.c.tm_pool_size())

    @threads.setter
    def threads(self, count: int) -> None:
        self.c.tm_pool_resize(count)

    @property
    def level(self) -> int:
        """The CPU level in use, an index into LEVEL_NAMES."""
        return int(self.c.tm_level())

    @level.setter
    def level(self, level: int) -> None:
        self.c.tm_set_level(level)

    @property
    def best_level(self) -> int:
        return int(self.c.tm_best_level())

    def has_level(self, level: int) -> bool:
        """Whether this CPU can use it: one with a better level need not have all below."""
        return bool(self.c.tm_has_level(level))


@lru_cache
def load(tell: Tell | None = None, cache_dir: Chosen = None) -> Library | str:
    """The library, or one sentence that says why there is none. Builds it first where only its sources are there."""
    if _loaded:
        return _loaded[0]
    packaged = Path(__file__).parent / "lib" / build.LIBRARY
    try:
        found = _open(packaged) if packaged.is_file() else _built(tell, cache_dir)
    except (build.BuildError, OSError) as error:
        return f"the native CPU library could not be built: {error}"
    if isinstance(found, Library):
        _loaded.append(found)
    return found


_loaded: list[Library] = []  # a process has one, wherever it was found: its threads are for all


def library() -> Library:
    """The library where it is known to be there."""
    found = load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def where_else() -> str | None:
    """Why the library is kept in a temporary folder, if it is, and what to do."""
    return _loaded[0].note if _loaded else None


def _built(tell: Tell | None, cache_dir: Chosen) -> Library | str:
    """Out of the cache, where it is made first if need be; of a cache that can only be read, what is there is used."""
    name = build.fingerprint()
    with contextlib.suppress(ConfigError):  # no home: a temporary folder is left
        cached = native_dir(cache_dir) / name / build.LIBRARY
        if cached.is_file():
            with contextlib.suppress(OSError):  # a folder of somebody else's can be read all the same
                os.utime(cached)  # builds that nobody loads are forgotten after a while
            return _open(cached)
    folder = writable_or_temporary("native", WHAT, cache_dir)
    try:
        found = _made(folder, name, tell)
    except (build.BuildError, OSError) as error:
        if folder.note is not None or "No space left" not in str(error):
            raise
        full = cannot_keep(WHAT, folder.path, OSError(errno.ENOSPC, "No space left on device"))
        folder = temporary("native", folder.path, full)
        found = _made(folder, name, tell)
    if isinstance(found, Library):
        found.note = folder.note
    return found


def _made(folder: Folder, name: str, tell: Tell | None) -> Library | str:
    target = folder.path / name / build.LIBRARY
    if not target.is_file():
        build.compile_library(target, tell and (lambda done, total: tell(done, total, "compiling CPU kernels")))
        build.forget_unused(folder.path, keep=target.parent)
    return _open(target)


def _open(path: Path) -> Library | str:
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        return f"the native CPU library at {path} cannot be loaded: {error}"
