"""Quantized weights and caches on a GPU: answers are those of the CPU's plain path with the same stored numbers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.step import Pending, Step
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.names import recipes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

FIXTURES = Path(__file__).parent.parent / "weights" / "data"
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "vocab_size": 4096,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[int, dict[str, int]] = {  # by head dimension
    64: {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2},
    128: {"hidden_size": 768, "intermediate_size": 1536, "num_attention_heads": 6, "num_key_value_heads": 2},
}
Case = tuple[int, dict[str, str]]  # head dimension, settings
ALONE: list[Case] = [
    *((64, {"quantization": form}) for form in ("int8", "int4-g128", "int4-g32-zeros", "w8a8", "fp8")),
    *((128, {"kv_cache_dtype": form}) for form in ("int8", "fp8", "int4")),
]
TOGETHER: list[Case] = [
    (64, {"quantization": "int8", "kv_cache_dtype": "int4"}),
    (64, {"quantization": "int4-g128", "kv_cache_dtype": "int8"}),
    (128, {"quantization": "int4-g32-zeros", "kv_cache_dtype": "fp8"}),
    (128, {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
    (128, {"quantization": "fp8,layers.0=int8,lm_head=int8", "kv_cache_dtype": "fp8"}),
]
PUBLIC = {
    "w4a16_group": {"quantization": "int4"}, "w8a8_static": {"quantization": "w8a8"}, "mixed": {"quantization": "fp8"},
}  # fmt: skip

# How far log-probabilities may be from the CPU's, in the mean and at most: about twice what bfloat16 makes of them on a
# CPU. What is rounded as it is computed, inputs and keys, moves by whole codes; float8 inputs are floats on the CPU.
NEAR = {
    "w8a8": (0.09, 0.45), "fp8": (0.17, 0.7), "kv int8": (0.04, 0.2), "kv fp8": (0.07, 0.3), "kv int4": (0.17, 0.7),
}  # fmt: skip


def near(options: dict[str, str]) -> tuple[float, float]:
    weights, cache = options.get("quantization", "").split(",")[0], options.get("kv_cache_dtype", "")
    return max(NEAR.get(weights, (0.03, 0.15)), NEAR.get(f"kv {cache}", (0.0, 0.0)))


def case_id(value: int | dict[str, str]) -> str:
    if isinstance(value, int):
        return str(value)
    return " + ".join(form if name == "quantization" else f"kv {form}" for name, form in value.items())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Random weights in files, since made-up ones are others on another device."""
    found = {}
    for head_dim, shape in SHAPES.items():
        folder = tmp_path_factory.mktemp("quantized") / str(head_dim)
        folder.mkdir()
        config = COMMON | shape | {"head_dim": head_dim}
        generator = torch.Generator().manual_seed(head_dim)
        tensors = {}
        for ways in recipes(spec_from_config(config)).values():
            for piece in ways[0]:
                value = torch.randn(piece.shape, generator=generator) * piece.shape[-1] ** -0.5
                tensors[piece.source] = (torch.ones(piece.shape) if len(piece.shape) == 1 else value).bfloat16()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        found[head_dim] = str(folder)
    return found


def open_gpu(model: str, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory": 64 << 20}
    return LLM(model, device="cuda", dtype="bfloat16", skip_tokenizer_init=True, **sizes | options)


def prompts(vocab: int = 4096, longest: int = 150) -> list[list[int]]:
    """More than 128 tokens in all, where products go other ways than for a few; the last two begin alike."""
    lengths = [1, longest // 12, longest // 5, longest // 2, longest, longest]
    ids = [[(31 * k + 7 * i * (k + 1)) % (vocab - 3) + 3 for i in range(length)] for k, length in enumerate(lengths)]
    return [*ids[:-1], ids[-2][: longest // 2] + ids[-1][longest // 2 :]]


def answers(llm: LLM, asked: list[list[int]], tokens: int = 40) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5, detokenize=False)
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert not [output.error for output in outputs if output.error]
    llm._built.engine.scheduler.check_integrity()
    return outputs


def read(llm: LLM, texts: list[list[int]], lengths: list[int]) -> list[list[float]]:
    """Log-probabilities of what follows each prompt, computed as part of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for text, length, output in zip(texts, lengths, llm.generate(texts, params, use_tqdm=False), strict=True):
        assert output.error is None and output.prompt_logprobs is not None
        tables = output.prompt_logprobs
        found.append([(tables[at] or {})[text[at]].logprob for at in range(length, len(text))])
    return found


def check_near(mine: list[list[float]], theirs: list[list[float]], allowed: tuple[float, float], what: str) -> None:
    gaps = [abs(a - b) for ours, others in zip(mine, theirs, strict=True) for a, b in zip(ours, others, strict=True)]
    assert all(gap == gap for gap in gaps), f"{what}: a log-probability is no number"
    print(f"{what}: log-probabilities differ by {fmean(gaps):.4f} in the mean, {max(gaps):.4f} at most")
    assert fmean(gaps) < allowed[0] and max(gaps) < allowed[1], f"{what}: more than {allowed}"


def check_against_cpu(llm: LLM, plain: LLM, asked: list[list[int]], allowed: tuple[float, float], what: str) -> None:
    """The GPU says what it says; both read it. The CPU widens codes to float32, and computes in it."""
    said = [output.outputs[0] for output in answers(llm, asked)]
    decoded = [[table[t].logprob for t, table in zip(one.token_ids, one.logprobs or [])] for one in said]
    texts = [prompt + one.token_ids for prompt, one in zip(asked, said, strict=True)]
    lengths = [len(prompt) for prompt in asked]
    expected = read(plain, texts, lengths)
    check_near(decoded, expected, allowed, f"{what}, decoded")
    check_near(read(llm, texts, lengths), expected, allowed, f"{what}, read")
    assert len({tuple(one.token_ids) for one in said}) == len(said)


def open_cpu(model: str, **options: Any) -> LLM:
    return LLM(model, device="cpu", dtype="float32", ops="reference", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(("head_dim", "options"), [*ALONE, *TOGETHER], ids=case_id)
def test_answers_are_those_of_the_plain_path(models: dict[int, str], head_dim: int, options: dict[str, str]) -> None:
    with open_gpu(models[head_dim], **options) as llm, open_cpu(models[head_dim], **options) as plain:
        check_against_cpu(llm, plain, prompts(), near(options), f"{head_dim} {options}")


@pytest.mark.parametrize("name", PUBLIC)
def test_checkpoints_of_public_tools_answer(name: str) -> None:
    model = str(FIXTURES / name)
    with open_gpu(model, max_model_len=128) as llm, open_cpu(model) as plain:
        assert any("as stored" in line for line in llm.plan_lines())
        check_against_cpu(llm, plain, prompts(64, 60), near(PUBLIC[name]), name)


def equal_up_to_ties(mine: list[RequestOutput], theirs: list[RequestOutput], gap: float) -> int:
    """How many answers are equal; where one is not, the other token was about as likely."""
    whole = 0
    for one, other in zip(mine, theirs, strict=True):
        ids, expected, tables = one.outputs[0].token_ids, other.outputs[0].token_ids, other.outputs[0].logprobs
        first = next((at for at, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            whole += 1
            continue
        table = (tables or [])[first]
        assert ids[first] in table and table[expected[first]].logprob - table[ids[first]].logprob < gap
    return whole


@pytest.mark.parametrize(("head_dim", "options"), TOGETHER, ids=case_id)
def test_recorded_steps_say_the_same_and_never_wait(
    models: dict[int, str], head_dim: int, options: dict[str, str]
) -> None:
    with open_gpu(models[head_dim], cuda_graphs=False, **options) as llm:
        plain = answers(llm, prompts())
    with open_gpu(models[head_dim], **options) as llm:
        equal = equal_up_to_ties(answers(llm, prompts()), plain, gap=0.1)
        print(f"{equal} of {len(plain)} answers of recorded steps equal those of plain ones")
        assert equal >= len(plain) - 1
        never_waits(llm)


def never_waits(llm: LLM) -> None:
    """By torch's own check for synchronizing calls while steps are launched."""
    front = llm._front
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    for number in range(8):
        front.submit(front.prepare([number + 5] * 20, params))
    for _ in range(20):
        front.step()
    engine, launched = front.engine, 0
    assert isinstance(engine, Engine)
    launch, failed = engine.runner.launch, engine.scheduler.stats.failed_steps

    def watched(step: Step) -> Pending:
        nonlocal launched
        launched += 1
        torch.cuda.set_sync_debug_mode("error")  # the engine takes an error for a failed step
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = watched  # type: ignore[method-assign]
    for _ in range(30):
        front.step()
    assert launched >= 25 and engine.scheduler.stats.failed_steps == failed, "a launch waited for the device"
