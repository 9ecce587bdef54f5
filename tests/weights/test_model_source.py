"""A model name leads to files, or to one sentence that says what to do."""

import errno
import os
import subprocess
import sys

import pytest

from tokenmill.errors import ModelError
from tokenmill.model.weights import default_model, source


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


def test_a_process_that_may_not_ask_the_hub_says_so(tmp_path):
    code = f"from tokenmill.model.weights import source; source.resolve('org/name', cache_dir={str(tmp_path)!r})"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True)
    assert "ModelError: org/name is not on this machine and HF_HUB_OFFLINE forbids to ask" in result.stderr


def test_a_full_disk_is_not_blamed_on_the_network(monkeypatch, tmp_path):
    import huggingface_hub

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match=r"no room for org/name in .*cache \(No space left on device\).*--cache-dir"):
        source.resolve("org/name", cache_dir=tmp_path / "cache")


def test_finding_models_does_not_import_torch():
    code = "import sys; import tokenmill.model.weights.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
