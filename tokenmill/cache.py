"""Where tokenmill keeps what can be downloaded or made again, and what is said where nothing can be kept."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import ConfigError, ModelError

VARIABLE = "TOKENMILL_CACHE"
ELSEWHERE = f"name another folder with --cache-dir, cache_dir= or {VARIABLE}"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST)

Chosen = str | os.PathLike[str] | None  # what an option says


@dataclass(frozen=True)
class Folder:
    """A folder that can be written, and whether it is the one that was asked for."""

    path: Path
    wanted: Path  # may hold what was put there ahead, even where nothing can be added
    note: str | None = None  # why `path` is another one, and what to do


def root(chosen: Chosen = None) -> Path:
    """The folder that everything is kept in: an absolute path, which need not be there yet."""
    if chosen is not None:
        return _absolute(chosen, "cache_dir")
    if named := os.environ.get(VARIABLE):
        return _absolute(named, VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # relative ones are to be ignored, says the specification
        return Path(base) / "tokenmill"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "tokenmill"
    if sys.platform == "win32":
        return _home() / "AppData" / "Local" / "tokenmill"
    return _home() / ".cache" / "tokenmill"


def models_dir(chosen: Chosen = None) -> Path:
    """The default model. Models of the hub have a cache of their own: `hub_dir`."""
    return root(chosen) / "models"


def hub_dir(chosen: Chosen = None) -> Path:
    """Where models of the hub are kept. Its own variables come before ours, and its own folder is the usual one."""
    if chosen is not None:
        return root(chosen)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(name):
            return _absolute(os.path.expandvars(named), name)
    if named := os.environ.get("HF_HOME"):
        return _absolute(os.path.expandvars(named), "HF_HOME") / "hub"
    if os.environ.get(VARIABLE):
        return root()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else _home() / ".cache") / "huggingface" / "hub"


def native_dir(chosen: Chosen = None) -> Path:
    """Builds of the native CPU library."""
    return root(chosen) / "native"


def layers_dir(chosen: Chosen = None) -> Path:
    """Layers of models that are larger than the memory, in the form that they are computed with."""
    return root(chosen) / "layers"


def figures_dir(kind: str, chosen: Chosen = None) -> Path:
    """What was measured on this machine ("plan"), or made for a measurement ("bench")."""
    return root(chosen) / kind


def kernel_cache_dir(chosen: Chosen = None) -> Folder:
    """Compiled GPU kernels."""
    return writable_or_temporary("kernels", "compiled kernels", chosen)


def writable_or_temporary(kind: str, what: str, chosen: Chosen = None) -> Folder:
    """A folder for what can be made again, so that nothing needs to fail: where there is no other, a temporary one."""
    wanted = None
    try:
        wanted = root(chosen) / kind
        check_writable(wanted)
        return Folder(wanted, wanted)
    except ConfigError as error:
        return temporary(kind, wanted, str(error))
    except OSError as error:
        return temporary(kind, wanted, cannot_keep(what, wanted or Path(kind), error))


def temporary(kind: str, wanted: Path | None, reason: str) -> Folder:
    """A temporary folder instead of `wanted`, and the reason."""
    path = temporary_dir() / kind
    path.mkdir(exist_ok=True)
    return Folder(path, wanted or path, f"{reason}; until then it is in {path}")


def check_writable(folder: Path) -> None:
    """Make the folder, and a file in it: an OSError says why that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def temporary_dir() -> Path:
    """A folder that lasts as long as the system's temporary ones. Libraries are loaded from it, so it must be ours."""
    if sys.platform == "win32":  # whose temporary folder belongs to the user
        path = Path(tempfile.gettempdir()) / "tokenmill"
        path.mkdir(exist_ok=True)
        return path
    path = Path(tempfile.gettempdir()) / f"tokenmill-{os.getuid()}"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return path
    return Path(tempfile.mkdtemp(prefix="tokenmill-"))


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all, and that everybody may read who may enter the folder."""
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


@contextlib.contextmanager
def kept_in(folder: Path, what: str) -> Iterator[None]:
    """Turns what the disk refuses into one sentence. For work on files of `folder` alone: it takes the blame."""
    try:
        yield
    except OSError as error:
        raise ModelError(cannot_keep(what, folder, error)) from None


def is_about_disk(error: OSError) -> bool:
    """Whether an error of unknown origin is one that files have and networks have not."""
    return error.errno in (*_NO_ROOM, *_NOT_OURS, *_IN_THE_WAY)


def cannot_keep(what: str, folder: Path, error: OSError) -> str:
    """Why `what` cannot be put into `folder`, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        return f"there is no room for {what} in {folder} ({reason}); make room there, or {ELSEWHERE}"
    if error.errno in _NOT_OURS:
        return f"{what} cannot be kept in {folder}, where this user may not write ({reason}); {ELSEWHERE}"
    if error.errno in _IN_THE_WAY:
        return f"{what} cannot be kept in {folder}, because a file is in the way ({reason}); move it, or {ELSEWHERE}"
    return f"{what} cannot be kept in {folder} ({reason}); {ELSEWHERE}"


def environment(folder: str) -> dict[str, str]:
    """The variables that make `folder` the cache of a process and of those that it starts."""
    path = str(_absolute(folder, "--cache-dir"))
    return {VARIABLE: path, "HF_HUB_CACHE": path}


def _absolute(folder: str | os.PathLike[str], name: str) -> Path:
    text = os.fspath(folder)
    if not text.strip():
        raise ConfigError(f"{name} is empty; name a folder, or leave it out")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:  # ~somebody
        raise ConfigError(f"{name} is {text!r}, but that home folder is not known; give the whole path") from None


def _home() -> Path:
    try:
        if os.environ.get("HOME") == "":  # which would be taken for the root of the disk
            import pwd

            return Path(pwd.getpwuid(os.getuid()).pw_dir)
        return Path.home()
    except (RuntimeError, KeyError):  # in a container, a user that no file knows
        raise ConfigError(
            "there is no home folder to keep models and builds in (HOME is not set, and this user is not known here); "
            f"set {VARIABLE} to a folder that can be written"
        ) from None
