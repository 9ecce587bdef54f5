"""What a quantized model says on a GPU and what the CPU's plain path makes of it, for one case in a process of its own.

Nearly all of a case's time is Triton compiling the kernels of its forms, one after the other. Cases in processes of
their own compile side by side, and an error of the device stays in one of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.step import Pending, Step
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.names import recipes

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "vocab_size": 4096,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[int, dict[str, int]] = {  # by head dimension
    64: {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2},
    128: {"hidden_size": 768, "intermediate_size": 1536, "num_attention_heads": 6, "num_key_value_heads": 2},
}
TOKENS = 40  # of an answer


@dataclass(frozen=True)
class Case:
    """A model with settings, and the prompts for it."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    vocab: int = 4096
    longest: int = 150  # prompt
    recorded: bool = False  # look at recorded steps, too
    device: str = "cuda"


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    tables: list[dict[int, float]]  # the likeliest tokens of every step with their log-probabilities

    @property
    def decoded(self) -> list[float]:
        return [table[token] for token, table in zip(self.tokens, self.tables, strict=True)]


@dataclass(frozen=True)
class Outcome:
    plan: list[str]
    said: list[Answer]  # by plain steps: those with log-probabilities are never recorded
    read: list[list[float]]  # log-probabilities of what was said, read as part of a prompt
    expected: list[list[float]]  # the same, of the CPU's plain path
    again: list[list[int]] = field(default_factory=list)  # what recorded steps say
    replays: int = 0  # steps of these
    launched: int = 0  # steps under a check for calls that wait for the device
    failed: int = 0  # of these


def write_model(folder: Path, head_dim: int) -> str:
    """Random weights in a file, since made-up ones are others on another device."""
    folder.mkdir()
    config = COMMON | SHAPES[head_dim] | {"head_dim": head_dim}
    generator = torch.Generator().manual_seed(head_dim)
    tensors = {}
    for ways in recipes(spec_from_config(config)).values():
        for piece in ways[0]:
            value = torch.randn(piece.shape, generator=generator) * piece.shape[-1] ** -0.5
            tensors[piece.source] = (torch.ones(piece.shape) if len(piece.shape) == 1 else value).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def measure(case: Case) -> Outcome:
    """The GPU says what it says; both read it. The CPU widens codes to float32, and computes in it."""
    torch.set_num_threads(2)
    asked = prompts(case.vocab, case.longest)
    lengths = [len(prompt) for prompt in asked]
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory": 64 << 20}
    if case.longest < 100:
        sizes["max_model_len"] = 128
    recorded: dict[str, Any] = {}
    with LLM(case.model, device=case.device, dtype="bfloat16", skip_tokenizer_init=True, **sizes | case.options) as llm:
        said = [_answer(output) for output in generate(llm, asked, logprobs=5)]
        texts = [prompt + one.tokens for prompt, one in zip(asked, said, strict=True)]
        mine, plan = read(llm, texts, lengths), llm.plan_lines()
        if case.recorded:
            recorded = look_at_recorded(llm, asked)
    with LLM(
        case.model, device="cpu", dtype="float32", ops="reference", skip_tokenizer_init=True, **case.options
    ) as plain:
        expected = read(plain, texts, lengths)
    return Outcome(plan, said, mine, expected, **recorded)


def prompts(vocab: int, longest: int) -> list[list[int]]:
    """More than 128 tokens in all, where products go other ways than for a few; the last two begin alike."""
    lengths = [1, longest // 12, longest // 5, longest // 2, longest, longest]
    ids = [[(31 * k + 7 * i * (k + 1)) % (vocab - 3) + 3 for i in range(length)] for k, length in enumerate(lengths)]
    return [*ids[:-1], ids[-2][: longest // 2] + ids[-1][longest // 2 :]]


def generate(llm: LLM, asked: list[list[int]], logprobs: int | None = None) -> list[RequestOutput]:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=logprobs, detokenize=False)
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


def look_at_recorded(llm: LLM, asked: list[list[int]]) -> dict[str, Any]:
    """What recorded steps say, and whether launching them waits, by torch's own check for synchronizing calls."""
    processor = llm._processor
    engine = processor.engine
    assert isinstance(engine, Engine) and isinstance(engine.runner, TorchRunner) and engine.runner._graphs is not None
    before = engine.runner._graphs.replays
    again = [output.outputs[0].token_ids for output in generate(llm, asked)]
    replays = engine.runner._graphs.replays - before
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    for number in range(8):
        processor.submit(processor.prepare([number + 5] * 20, params))
    for _ in range(20):
        processor.step()
    launched, failed, launch = 0, engine.scheduler.stats.failed_steps, engine.runner.launch

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
        processor.step()
    failed = engine.scheduler.stats.failed_steps - failed
    return {"again": again, "replays": replays, "launched": launched, "failed": failed}


def _answer(output: RequestOutput) -> Answer:
    one = output.outputs[0]
    tables = [{token: entry.logprob for token, entry in table.items()} for table in one.logprobs or []]
    return Answer(list(one.token_ids), tables)
