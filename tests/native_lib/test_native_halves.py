"""Checkpoints of 16-bit floats on a CPU: weights stay 16 bits, and answers are those of the same values in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers

from tokenmill import LLM, SamplingParams
from tokenmill.model.layers import MoEWeights, ResidentWeights
from tokenmill.ops.native import library
from tokenmill.quant.schemes.experts import Experts
from tokenmill.quant.schemes.scheme import Linear

PROMPT = [(53 * place + 17) % 150 + 5 for place in range(21)]
NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
MATRICES = ("linear", "embedding", "experts")
SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 2, "max_model_len": 64}


def matrices(weights: ResidentWeights, layers: int) -> list[Linear]:
    found = [
        weights.embed,
        weights.lm_head,
        *(one for index in range(layers) for one in weights.layer(index).linears()),
    ]
    for mlp in (weights.layer(index).mlp for index in range(layers)):
        for experts in (mlp.gate_up, mlp.down) if isinstance(mlp, MoEWeights) else ():
            assert isinstance(experts, Experts)
            found += [experts.linear(expert) for expert in range(len(experts))]
    return list({id(one.storage): one for one in found}.values())  # an embedding may be the head, too


def answer(folder: Path, **options: object) -> tuple[list[int], list[str], int]:
    """The tokens, the forms of all matrices, and how far the plan is from the bytes they take."""
    with LLM(str(folder), **SETTINGS, **options) as llm:
        tokens = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        weights, spec = llm._processor.engine.runner.decoder.weights, llm._built.spec
        if not isinstance(weights.embed, Linear):
            return tokens, [], 0
        all_of_them = matrices(weights, spec.num_layers)
        forms = [segment[0].name for one in all_of_them for segment in one.storage.matrix.segments]
        others = sum(param.numel for param in spec.parameters().values() if param.kind not in MATRICES)
        held = sum(panels.nbytes for one in all_of_them for panels in one.storage.values())
        return tokens, forms, llm._built.settings.memory.weights - 4 * others - held


@pytest.mark.parametrize("case", tiny_models.CASES)
def test_answers_are_those_of_the_same_values_in_float32(native: library.Library, tmp_path: Path, case: str) -> None:
    tiny_models.make(case).to(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([PROMPT]), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0
        )
    expected = out[0, len(PROMPT) :].tolist()
    tokens, forms, unplanned = answer(tmp_path)
    assert set(forms) == {"bf16"} and unplanned == 0
    assert tokens == expected
    assert answer(tmp_path, ops="reference")[:2] == (expected, [])


@pytest.mark.parametrize("tied", [False, True])
def test_every_type_is_kept_and_what_is_asked_for_is_done(native: library.Library, tmp_path: Path, tied: bool) -> None:
    case = "llama-multi-head" if tied else "llama"
    model = tiny_models.make(case).to(torch.float16)
    model.save_pretrained(tmp_path)
    tokens, forms, unplanned = answer(tmp_path)
    assert set(forms) == {"f16"} and unplanned == 0
    wide, forms, _ = answer(tmp_path, quantization="fp32")
    assert wide == tokens
    # The head and the embedding are in no layer, and are as the file has them.
    assert [name for name in forms if name != "f32"] == ["f16"] * (1 if tied else 2)
    model.float().save_pretrained(tmp_path)
    again, forms, unplanned = answer(tmp_path)
    assert again == tokens and set(forms) == {"f32"} and unplanned == 0


def test_the_cache_is_as_exact_as_the_weights(native: library.Library, tmp_path: Path) -> None:
    tiny_models.make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    for options, dtype in (({}, torch.float32), ({"quantization": "bf16"}, torch.float16)):
        with LLM(str(tmp_path), **SETTINGS, **options) as llm:
            assert llm._processor.engine.runner.state.arena.dtype == dtype


def test_random_weights_have_the_size_of_those_they_stand_for(native: library.Library, tmp_path: Path) -> None:
    model = tiny_models.make("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    _, forms, unplanned = answer(tmp_path, load_format="dummy")
    assert set(forms) == {"bf16"} and unplanned == 0
