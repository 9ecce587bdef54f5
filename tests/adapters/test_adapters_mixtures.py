"""Adapters on mixtures of experts and on latent attention: what is adapted is as in merged weights, and the rest is
refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from group_of_threads import llm_of_threads
from safetensors.torch import save_file

from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.errors import InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 6]
RANK, ALPHA = 3, 6
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float64", "device": "cpu", "max_model_len": 64}
CASES = {  # and what some of its modules are called
    "mixtral": ("self_attn.k_proj",),
    "qwen3-moe-some-dense": ("self_attn.v_proj", "mlp.down_proj"),
    "deepseek-v2-lite": ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.gate_proj"),
    "deepseek-v2": ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.o_proj", "mlp.shared_experts.down_proj"),
}


@dataclass(frozen=True)
class Folders:
    base: str
    merged: str
    adapter: Path
    modules: tuple[str, ...]


def write_adapter(folder: Path, factors: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {}
    for module, sides in factors.items():
        for side, one in zip("AB", sides, strict=True):
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = one.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": None, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=CASES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A base, an adapter at every linear layer that may have one, and both as one model."""
    at, make = tmp_path_factory.mktemp("mixture"), torch.Generator().manual_seed(1)
    model = tiny_models.make(request.param)
    model.save_pretrained(at / "base")
    factors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or ".experts." in name or name.endswith((".gate", "lm_head")):
            continue
        if name.endswith("kv_b_proj"):
            continue
        down = torch.randn(RANK, module.in_features, generator=make) / module.in_features**0.5
        up = 0.4 * torch.randn(module.out_features, RANK, generator=make)
        factors[name] = down, up
        with torch.no_grad():
            module.weight += ALPHA / RANK * (up @ down)
    model.save_pretrained(at / "merged")
    for part in CASES[request.param]:
        assert any(name.endswith(part) for name in factors), part
    return Folders(str(at / "base"), str(at / "merged"), write_adapter(at / "adapter", factors), tuple(factors))


def said(llm: LLM, adapter: str = "") -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, False, adapter=adapter)]


def test_what_may_be_adapted_is_as_in_merged_weights(folders: Folders) -> None:
    with LLM(folders.base, **OPTIONS) as plain, LLM(folders.merged, **OPTIONS) as merged:
        base, wanted = said(plain), said(merged)
        assert base != wanted
    for parallel in (None, "tp2", "tp2,ep2"):
        how = {"model": folders.base, "enable_lora": True, "speculation": "off", **OPTIONS}
        with LLM(**how) if parallel is None else llm_of_threads(parallel, **how) as llm:
            llm.load_adapter("all", folders.adapter)
            for _ in range(2):
                assert said(llm, "all") == wanted, parallel
                assert said(llm) == base, parallel
            asked = [None, LoRARequest("all")]
            mixed = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, False, lora_request=asked)]
            assert mixed == [base[0], wanted[1]], parallel


def test_recorded_steps_with_experts_say_the_same(folders: Folders) -> None:
    """float32, which the native library computes: one token is enough to tell the models apart."""
    options = OPTIONS | {"dtype": "float32", "speculation": "off"}
    with LLM(folders.merged, **options) as merged:
        wanted = [one[:3] for one in said(merged)]
    with LLM(folders.base, enable_lora=True, **options) as llm:
        llm.load_adapter("all", folders.adapter)
        for _ in range(3):
            assert [one[:3] for one in said(llm, "all")] == wanted


REFUSED = {
    "mlp.experts.3.gate_proj": "is one of its experts; those are not adapted",
    "mlp.experts.0.down_proj": "is one of its experts; those are not adapted",
    "mlp.experts.gate_up_proj": "is one of its experts; those are not adapted",
    "block_sparse_moe.experts.1.w2": "is one of its experts; those are not adapted",
    "mlp.gate": "chooses its experts, which is not adapted",
    "self_attn.kv_b_proj": "taken into queries and answers head by head",
}


def test_the_rest_is_refused_with_a_sentence_that_names_it(folders: Folders, tmp_path: Path) -> None:
    ones = torch.ones(RANK, 48), torch.ones(48, RANK)
    latent = any("kv_a_proj" in name for name in folders.modules)
    with LLM(folders.base, enable_lora=True, **OPTIONS) as llm:
        before = said(llm)
        for module, why in REFUSED.items():
            if module.endswith("kv_b_proj") and not latent:
                why = "no linear layer for"
            name = f"model.layers.1.{module}"
            adapter = write_adapter(tmp_path / module, {name: ones})
            with pytest.raises(InvalidRequest) as caught:
                llm.load_adapter("bad", adapter)
            assert why in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value), module
        assert said(llm) == before
