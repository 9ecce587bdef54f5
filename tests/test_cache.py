"""One folder for what can be downloaded or made again: who names it, and what is said where it cannot be used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenmill import cache
from tokenmill.cli.app import app
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, ModelError

VARIABLES = ("TOKENMILL_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home of its own, and no variables but those a test sets."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.chdir(tmp_path)


def test_the_first_that_is_set_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.root() == tmp_path / "home" / ".cache" / "tokenmill"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "xdg" / "tokenmill"
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "ours"))
    assert cache.root() == tmp_path / "ours"
    assert cache.root(tmp_path / "option") == tmp_path / "option"
    folders = (
        cache.models_dir("o"),
        cache.native_dir("o"),
        cache.kernel_cache_dir("o").path,
        cache.figures_dir("p", "o"),
    )
    assert [folder.relative_to(tmp_path / "o").name for folder in folders] == ["models", "native", "kernels", "p"]


def test_a_mac_keeps_it_among_its_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.root() == tmp_path / "home" / "Library" / "Caches" / "tokenmill"


def test_empty_and_relative_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("TOKENMILL_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.root() == home / ".cache" / "tokenmill"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    assert cache.root() == home / ".cache" / "tokenmill"
    monkeypatch.setenv("TOKENMILL_CACHE", "relative")
    assert cache.root() == tmp_path / "relative"
    monkeypatch.setenv("TOKENMILL_CACHE", "~/kept")
    assert cache.root() == home / "kept"
    with pytest.raises(ConfigError, match="cache_dir is empty; name a folder"):
        cache.root(" ")
    with pytest.raises(ConfigError, match="cache_dir is empty"):
        EngineConfig(cache_dir="")
    with pytest.raises(ConfigError, match="cache_dir is 3; it must be the path"):
        EngineConfig(cache_dir=3)  # type: ignore[arg-type]


def test_the_hubs_variables_come_before_ours_and_after_an_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache.hub_dir() == tmp_path / "home" / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", "")  # which the hub itself would take for the working directory
    assert cache.hub_dir() == tmp_path / "home" / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.hub_dir() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "ours"))
    assert cache.hub_dir() == tmp_path / "ours"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert cache.hub_dir() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cache.hub_dir() == tmp_path / "hub"
    assert cache.hub_dir("option") == tmp_path / "option"


def test_the_hub_agrees_where_its_models_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What other programs downloaded is found: huggingface_hub reads its variables in a process of its own."""
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    for name, value in (("HF_HOME", "hf"), ("HF_HUB_CACHE", "hub"), ("XDG_CACHE_HOME", "xdg")):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / value))
            theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert theirs.stdout.strip() == str(cache.hub_dir())


def test_without_a_home_a_sentence_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container with a random user, whom no file knows."""
    import pwd

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for home in (None, ""):
        if home is None:
            monkeypatch.delenv("HOME")
        else:
            monkeypatch.setenv("HOME", home)
        with pytest.raises(ConfigError, match=r"no home folder .*HOME is not set.* set TOKENMILL_CACHE"):
            cache.models_dir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache.kernel_cache_dir()
    assert folder.path.is_relative_to(tmp_path) and folder.note is not None and "TOKENMILL_CACHE" in folder.note
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "volume"))
    assert cache.models_dir() == tmp_path / "volume" / "models"
    assert cache.kernel_cache_dir() == cache.Folder(tmp_path / "volume" / "kernels", tmp_path / "volume" / "kernels")


def test_a_folder_that_can_be_written_is_used(tmp_path: Path) -> None:
    folder = cache.kernel_cache_dir(tmp_path / "new" / "one")
    assert folder.path == folder.wanted == tmp_path / "new" / "one" / "kernels"
    assert folder.note is None and folder.path.is_dir() and not list(folder.path.iterdir())


def test_one_that_cannot_be_written_is_replaced_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    folder = cache.kernel_cache_dir(tmp_path / "image")
    assert folder.wanted == tmp_path / "image" / "kernels" != folder.path
    assert folder.note is not None and str(folder.wanted) in folder.note and str(folder.path) in folder.note
    assert "Read-only file system" in folder.note and "--cache-dir" in folder.note


def test_a_temporary_folder_that_others_can_write_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Libraries are loaded from it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    usual = tmp_path / f"tokenmill-{os.getuid()}"
    assert cache.temporary_dir() == usual and usual.stat().st_mode & 0o777 == 0o700
    assert cache.temporary_dir() == usual  # and again
    usual.chmod(0o777)
    assert cache.temporary_dir() != usual
    usual.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    usual.symlink_to(tmp_path / "elsewhere")
    assert cache.temporary_dir() != usual


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "no room for it in /x (why); make room there, or name another folder"),
        (errno.EDQUOT, "no room"),
        (errno.EACCES, "where this user may not write (why); name another folder with --cache-dir"),
        (errno.EROFS, "may not write"),
        (errno.ENOTDIR, "a file is in the way"),
        (errno.EIO, "it cannot be kept in /x (why)"),
    ],
)
def test_what_the_disk_refuses_is_one_sentence(number: int, expected: str) -> None:
    with pytest.raises(ModelError) as caught, cache.kept_in(Path("/x"), "it"):
        raise OSError(number, "why")
    assert expected in str(caught.value) and "TOKENMILL_CACHE" in str(caught.value)


def test_the_option_holds_for_a_command_and_no_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(
        "tokenmill.model.weights.source.list_cached", lambda: seen.append((cache.root(), cache.hub_dir())) or []
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert CliRunner().invoke(app, ["models", "--cache-dir", "here"]).exit_code == 0
    assert seen == [(tmp_path / "here", tmp_path / "here")]
    assert "TOKENMILL_CACHE" not in os.environ and "HF_HUB_CACHE" not in os.environ
    refused = CliRunner().invoke(app, ["models", "--cache-dir", ""])
    assert refused.exit_code == 2 and "--cache-dir is empty; name a folder" in refused.output


def test_every_command_that_loads_a_model_takes_the_option() -> None:
    for command in ("run", "chat", "serve", "pull", "models", "quantize", "plan", "ladder"):
        assert "--cache-dir" in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output, command
    for command in ("offline", "latency", "serve", "ops", "trace", "cpu"):
        found = CliRunner().invoke(app, ["bench", command, "--help"], env={"COLUMNS": "200"})
        assert "--cache-dir" in found.output, command


def test_a_file_is_written_whole_and_for_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list.json"
    cache.write_whole(path, "old")
    assert path.read_text() == "old" and path.stat().st_mode & 0o777 == 0o644

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        cache.write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
