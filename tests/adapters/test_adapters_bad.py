"""Adapters that cannot be served are refused in a sentence, and the base answers as before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_folders import write_adapter, write_base
from safetensors.torch import load_file, save_file

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError, InvalidRequest, TokenmillError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "max_model_len": 64}
AT = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    base = write_base(tmp_path_factory.mktemp("bad") / "base")
    with LLM(str(base), enable_lora=True, max_lora_rank=8, lora_host_memory=100_000, **OPTIONS) as one:
        yield one


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(change_them: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change_them(tensors)
        save_file(tensors, path)

    return change


def renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [one for one in tensors if old in one]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter to read .* give a folder"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter to read"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
    "a list": (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "not the config of an adapter"),
    "deep JSON": (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "is not"),
    "large config": (lambda folder: (folder / "adapter_config.json").write_text(" " * (1 << 21)), "not the config"),
    "another kind": (with_config(peft_type="IA3"), "peft_type='IA3'; only LORA"),
    "DoRA": (with_config(use_dora=True), "DoRA rescales whole weights"),
    "biases": (with_config(bias="lora_only"), "bias='lora_only': biases of an adapter"),
    "modules": (with_config(modules_to_save=["lm_head"]), "whole modules of an adapter"),
    "tokens": (with_config(trainable_token_indices=[3]), "embeddings of an adapter"),
    "transposed": (with_config(fan_in_fan_out=True), "no layer here has its weight transposed"),
    "PiSSA": (with_config(init_lora_weights="pissa_niter_4"), "changes the base's weights"),
    "rank 0": (with_config(r=0), "rank of 0; it must be a positive whole number"),
    "rank as text": (with_config(r="8"), "rank of '8'"),
    "alpha NaN": (with_config(lora_alpha=float("nan")), "lora_alpha of nan"),
    "alpha missing": (with_config(lora_alpha=None), "lora_alpha of None"),
    "a huge pattern": (with_config(rank_pattern={"(a+)+$": 4}), "too complicated"),
    "no expression": (with_config(rank_pattern={"[": 4}), "is no expression"),
    "targets": (with_config(target_modules=[5]), "must be names of modules"),
    "another rank": (with_config(r=3), r"has \[4, 48\] at .* with rank 3 needs \[3, 48\]"),
    "rank too large": (lambda folder: write_adapter(folder, rank=9), "there is room for 8; raise max_lora_rank"),
    "NaN": (with_tensors(lambda t: t[f"{AT}A.weight"].fill_(float("nan"))), "no number in float32 at .*q_proj"),
    "overflow": (with_config(lora_alpha=1e42), "no number in float32"),
    "wrong shape": (
        with_tensors(lambda t: t.update({f"{AT}B.weight": torch.zeros(64, 4)})),
        r"has \[64, 4\] .* base with rank 4 needs \[32, 4\] there; it was made for 'tiny'",
    ),
    "half of a pair": (with_tensors(lambda t: t.pop(f"{AT}B.weight")), "lacks 'model.layers.0.self_attn.q_proj.lora_B"),
    "a missing module": (
        with_tensors(lambda t: [t.pop(f"{AT}{side}.weight") for side in "AB"]),
        "lacks 'model.layers.0.self_attn.q_proj', one of its target_modules",
    ),
    "a target of another model": (with_config(target_modules=["q_proj", "c_attn"]), "lacks 'c_attn'"),
    "more layers": (with_tensors(lambda t: renamed(t, "layers.1.", "layers.7.")), "has no linear layer for"),
    "the head": (
        with_tensors(lambda t: renamed(t, "model.layers.1.self_attn.q_proj", "lm_head")),
        "adapts 'lm_head', which in base is the head, which is not adapted; leave it out",
    ),
    "DoRA's tensors": (
        with_tensors(lambda t: t.update({f"{AT}magnitude_vector": torch.ones(32)})),
        "no linear layer for",
    ),
    "nothing": (with_tensors(lambda t: t.clear()), "holds no tensors"),
    "cut": (cut, "truncated or corrupt"),
    "no file": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 64), "truncated or corrupt"),
    "more than a line takes": (
        lambda folder: write_adapter(folder, rank=8),
        "but ranks on other machines are sent 0.0 MiB at most; use one of a smaller rank",
    ),
    "too large": (lambda folder: write_adapter(folder, rank=8), "0.0 MiB, but lora_host_memory is"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_is_refused_in_a_sentence(
    llm: LLM, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "more than a line takes":
        monkeypatch.setattr(llm._built.engine.adapters, "_most", 1000)
    if name == "too large":
        llm._built.engine.adapters._host_bytes = 1000  # type: ignore[union-attr]
    before = llm.generate([[3, 4, 5]], GREEDY, False)[0].outputs[0].token_ids
    folder = write_adapter(tmp_path / "adapter")
    change, said = BAD[name]
    change(folder)
    with pytest.raises(InvalidRequest, match=said) as caught:
        llm.load_adapter("bad", folder)
    assert isinstance(caught.value, TokenmillError) and "\n" not in str(caught.value) and len(str(caught.value)) < 800
    with pytest.raises(InvalidRequest, match="there is no adapter 'bad'"):
        llm.generate([[3, 4, 5]], GREEDY, False, adapter="bad")
    assert llm.generate([[3, 4, 5]], GREEDY, False)[0].outputs[0].token_ids == before
    llm._built.engine.adapters._host_bytes = 100_000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "path"), [("", "x"), ("a\n", "x"), (5, "x"), ("a" * 300, "x"), ("a", ""), ("a", "\0")]
)
def test_names_and_paths_are_checked(llm: LLM, name: Any, path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"an adapter's (name|path) is"):
        llm.load_adapter(name, path)


def test_slots_are_in_the_memory_plan_and_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    base = str(write_base(tmp_path / "base"))
    with pytest.raises(ConfigError, match="does not fit"):
        LLM(base, enable_lora=True, max_loras=10_000_000, max_lora_rank=256, **OPTIONS)
    with LLM(base, **OPTIONS) as without, LLM(base, enable_lora=True, max_loras=1000, **OPTIONS) as one:
        engine = one._built.engine
        assert engine.adapters is not None
        tensors = engine.runner.decoder.adapters.values()  # type: ignore[attr-defined]
        held = sum(one.down.nbytes + one.up.nbytes for one in tensors)
        planned = one._built.settings.memory.weights - without._built.settings.memory.weights
        assert held == planned
        assert any(line.startswith("adapters     1000 of rank 16 or less") for line in one.plan_lines())


@pytest.mark.parametrize("value", [0, 257, "8"])
def test_ranks_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_lora_rank is .* of at most 256"):
        LLM("x", enable_lora=True, max_lora_rank=value)
