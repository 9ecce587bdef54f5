"""A model or setting that cannot be used is refused with one sentence that says what to do, before weights load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from api_engines import SETTINGS

from tokenmill import LLM
from tokenmill.engine import rank_model
from tokenmill.errors import ConfigError, ModelError, TokenmillError
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.names import recipes


def refusal(kind: type[TokenmillError], words: list[str], model: Any, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        LLM(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def copy_of(model: str, folder: Path, **changes: Any) -> str:
    """The model's folder with another config."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def saved_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with weights in a file."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("models") / "saved"
    shutil.copytree(tiny_model, folder)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    pieces = {piece.source: piece.shape for ways in recipes(spec).values() for piece in ways[0]}
    save_file({name: torch.full(shape, 0.01) for name, shape in pieces.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when weights are made or read."""

    def load(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(rank_model, "load", load)


SETTING_REFUSALS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "close to a setting": ({"max_modle_len": 5}, ["no setting 'max_modle_len'", "did you mean 'max_model_len'"]),
    "like no setting": ({"zzz": 5}, ["no setting 'zzz'", "there are", "block_size"]),
    "wrong dtype": ({"dtype": "int8"}, ["dtype is 'int8'", "float32, bfloat16"]),
    "dtype of another type": ({"dtype": 32}, ["dtype is 32", "float32"]),
    "wrong load format": ({"load_format": "pickle"}, ["load_format is 'pickle'", "safetensors, gguf, dummy"]),
    "wrong policy": ({"policy": "random"}, ["policy is 'random'", "priority, fcfs"]),
    "wrong device": ({"device": "abacus"}, ["device is 'abacus'", "cpu"]),
    "a device that torch has and we do not": ({"device": "meta"}, ["device is 'meta'", "cpu, cuda"]),
    "block size of 24": ({"block_size": 24}, ["block_size is 24", "power of two"]),
    "block size of 0": ({"block_size": 0}, ["block_size is 0", "positive whole number"]),
    "rows as text": ({"max_num_seqs": "8"}, ["max_num_seqs is '8'", "positive whole number"]),
    "rows as truth value": ({"max_num_seqs": True}, ["max_num_seqs is True", "positive whole number"]),
    "no queue": ({"max_queued_requests": 0}, ["max_queued_requests is 0", "positive whole number"]),
    "switch as text": ({"enable_prefix_caching": "no"}, ["enable_prefix_caching is 'no'", "True or False"]),
    "seed as text": ({"seed": "x"}, ["seed is 'x'", "whole number"]),
    "more memory than there is": ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization is 1.5", "at most 1"]),
    "memory as text": ({"gpu_memory_utilization": "half"}, ["gpu_memory_utilization is 'half'", "at most 1"]),
    "quantization to come": ({"quantization": "int3"}, ["quantization='int3'", "there are int8, int4"]),
    "a layer that is not there": ({"quantization": "int8,layers.99=bf16"}, ["'layers.99'", "name no others"]),
    "longer than the model": ({"max_model_len": 513}, ["max_model_len is 513", "512 positions", "512 or less"]),
    "fewer tokens than rows": (
        {"max_num_batched_tokens": 4, "max_num_seqs": 8},
        ["max_num_batched_tokens is 4", "max_num_seqs 8", "raise the first or lower the second"],
    ),
    "no room for one request": (
        {"kv_cache_memory": 1000, "max_model_len": 64},
        ["kv_cache_memory is 1,000 bytes", "max_model_len 64 tokens takes 16,384", "or lower max_model_len"],
    ),
    "no room for one block": ({"kv_cache_memory": 10}, ["kv_cache_memory is 10 bytes", "block of 16", "takes 4,096"]),
    "more KV than memory": (
        {"kv_cache_memory": 1 << 50},
        ["does not fit", "1048576.00 GiB kv cache", "lower kv_cache_memory"],
    ),
}


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("name", SETTING_REFUSALS)
def test_a_setting_that_cannot_be_respected_is_refused_before_loading(tiny_model: str, name: str) -> None:
    options, words = SETTING_REFUSALS[name]
    base = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    refusal(ConfigError, words, tiny_model, **base | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(tiny_model: str) -> None:
    refusal(ConfigError, ["device is 'cuda'", "no GPU", "device='cpu'"], tiny_model, **SETTINGS | {"device": "cuda"})


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_model_that_cannot_fit_is_refused_before_loading_with_numbers_and_options(
    tiny_model: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200, "num_attention_heads": 512}
    huge = copy_of(tiny_model, tmp_path / "huge", **sizes, head_dim=128)
    words = ["does not fit", "GiB weights", "activations", "workspace", "may be used", "lower max", "smaller dtype"]
    refusal(ConfigError, words, huge, **SETTINGS)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_unknown_architecture_is_refused_by_name(tiny_model: str, tmp_path: Path) -> None:
    strange = copy_of(tiny_model, tmp_path / "strange", architectures=["MambaForCausalLM"], model_type="mamba")
    refusal(ModelError, [f"{strange}/config.json: ", "MambaForCausalLM", "supported"], strange, **SETTINGS)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("key", "value"), [("num_attention_heads", "nine"), ("rope_scaling", "yarn"), ("hidden_act", "relu")]
)
def test_a_wrong_config_is_refused_with_its_path(tiny_model: str, tmp_path: Path, key: str, value: str) -> None:
    wrong = copy_of(tiny_model, tmp_path / "wrong", **{key: value})
    refusal(ModelError, [f"{wrong}/config.json", repr(value)], wrong, **SETTINGS)


def test_a_wrong_quantization_is_refused_with_its_path(saved_model: str, tmp_path: Path) -> None:
    wrong = copy_of(saved_model, tmp_path / "wrong", quantization_config="int4")
    words = [f"{wrong}/config.json has quantization_config='int4'"]
    refusal(ModelError, words, wrong, skip_tokenizer_init=True, device="cpu")


def test_a_config_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ')
    refusal(ModelError, ["config.json", "not valid JSON"], str(tmp_path), **SETTINGS)


def test_a_missing_tokenizer_is_refused(saved_model: str) -> None:
    refusal(ModelError, ["no tokenizer.json"], saved_model, device="cpu")


def test_the_undamaged_files_are_read(saved_model: str) -> None:
    LLM(saved_model, skip_tokenizer_init=True, device="cpu", max_num_seqs=2).shutdown()


@pytest.mark.parametrize("keep", [0, 5, 1000, 20_000])
def test_truncated_safetensors_are_refused_by_file_name(saved_model: str, tmp_path: Path, keep: int) -> None:
    broken = Path(copy_of(saved_model, tmp_path / "broken"))
    whole = (broken / "model.safetensors").read_bytes()
    assert keep < len(whole)
    (broken / "model.safetensors").write_bytes(whole[:keep])
    words = ["model.safetensors", "truncated or corrupt", "download it again"]
    refusal(ModelError, words, str(broken), skip_tokenizer_init=True, device="cpu")


def test_weights_that_are_not_there_are_refused(tiny_model: str) -> None:
    refusal(ModelError, ["no .safetensors files"], tiny_model, skip_tokenizer_init=True, device="cpu")


def test_weights_of_another_config_are_refused(saved_model: str, tmp_path: Path) -> None:
    other = copy_of(saved_model, tmp_path / "other", intermediate_size=64)
    words = ["has shape", "config.json implies"]
    refusal(ModelError, words, other, skip_tokenizer_init=True, device="cpu")


def test_weights_of_a_type_that_is_not_read_are_refused(saved_model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole = copy_of(saved_model, tmp_path / "whole")
    file = Path(whole) / "model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    refusal(ModelError, ["of type int8", "float32"], whole, skip_tokenizer_init=True, device="cpu")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"not a model" * 100])
def test_a_corrupt_gguf_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    refusal(ModelError, ["broken.gguf"], str(file), device="cpu")


def test_a_truncated_gguf_file_is_refused(default_model: str, tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    with open(default_model, "rb") as whole:
        file.write_bytes(whole.read(20_000_000))
    refusal(ModelError, ["half.gguf"], str(file), device="cpu")


def test_a_load_format_that_the_files_do_not_have_is_refused(saved_model: str) -> None:
    refusal(ConfigError, ["load_format is 'gguf'", "use load_format='auto'"], saved_model, load_format="gguf")


@pytest.mark.parametrize("model", ["/no/such/model", "no such model", "", 5])
def test_a_model_that_is_nowhere_is_refused_by_name(model: Any) -> None:
    refusal(ModelError, [repr(str(model)), "check the path"], model, device="cpu")
