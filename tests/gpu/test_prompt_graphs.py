"""Steps that read prompts give the same in recorded pieces as plainly, keep no memory, and wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.piecewise import PieceGraphs, token_sizes
from tokenmill.engine.runner.torch_runner import TorchRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 2048,
}  # fmt: skip
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 8,
    "kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "topk_method": "greedy",
}  # fmt: skip
WINDOWED = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 64, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0, "tie_word_embeddings": True,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "mixture": (MIXTURE, {}),
    "latent": (LATENT, {}),
    "windows": (WINDOWED, {}),
    "batch-invariant": ({}, {"batch_invariant": True}),
    "fp8 + kv fp8": ({}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "w8a8 + kv int8": ({}, {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
    "int4": ({}, {"quantization": "int4-g128"}),
}
WHOLE = (16, 64, 128, 256)  # tokens of prompts that need no padding
TIMES = 8  # until every size that comes up has a recording of its own
# How far log-probabilities of padded steps may be from plain ones: products of another size may add up in another
# order, and what is rounded as it is computed moves by whole codes.
NEAR, ROUNDED_NEAR = 0.15, 0.7

Tables = list[tuple[list[int], list[dict[int, float]]]]


def runner_of(llm: LLM) -> TorchRunner:
    runner = llm._built.engine.runner  # type: ignore[attr-defined]
    assert isinstance(runner, TorchRunner) and runner._pieces is not None
    return runner


def prompt(length: int, number: int = 0) -> list[int]:
    return [(31 * place + 977 * number + 7 * place * number) % 4000 + 5 for place in range(length)]


def said(llm: LLM, prompts: list[list[int]], tokens: int) -> Tables:
    """Answers with log-probabilities, which no recorded decode step gives: all steps may be run in pieces."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs if output.error] == []
    return [
        (
            list(one.token_ids),
            [{token: entry.logprob for token, entry in table.items()} for table in one.logprobs or []],
        )
        for one in (output.outputs[0] for output in outputs)
    ]


def both(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[Tables, Tables]:
    """By plain steps, and by steps that are replayed."""
    runner = runner_of(llm)
    pieces = runner._pieces
    assert pieces is not None
    runner._pieces = None
    plain = said(llm, prompts, tokens)
    runner._pieces = pieces
    for _ in range(TIMES):
        before = pieces.replays, pieces.plain_runs
        found = said(llm, prompts, tokens)
    assert pieces.replays > before[0] and pieces.plain_runs == before[1]  # all of the last time was replayed
    return plain, found


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LLM]]:
    changes, options = CASES[request.param]
    model = write_tiny(tmp_path_factory.mktemp("prompts") / "model", **SHAPE | changes)
    with LLM(
        model, load_format="dummy", device="cuda", dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=16,
        max_num_batched_tokens=512, max_model_len=1024, kv_cache_memory=256 << 20, **options,
    ) as llm:  # fmt: skip
        yield request.param, llm


@pytest.mark.filterwarnings("error:.*run plainly")
def test_a_step_that_needs_no_padding_gives_the_bits_of_a_plain_one(case: tuple[str, LLM]) -> None:
    """The same kernels with the same sizes."""
    for length in WHOLE:
        assert length in token_sizes(512)
        plain, found = both(case[1], [prompt(length)], 1)
        assert found == plain, f"{length} tokens"


@pytest.mark.filterwarnings("error:.*run plainly")
def test_prompts_beside_decodes_are_near_plain_ones(case: tuple[str, LLM]) -> None:
    """Steps of any size, so that most are padded. Answers are compared as long as they are equal."""
    name, llm = case
    lengths = [1, 9, 33, 70, 101, 150, 3, 200, 17, 300, 45, 260]
    plain, found = both(llm, [prompt(length, number) for number, length in enumerate(lengths)], 12)
    if name == "batch-invariant":
        assert found == plain
    worst, compared = 0.0, 0
    for (tokens, tables), (others, theirs) in zip(found, plain, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        compared += same
        for table, other in zip(tables[: same + 1], theirs[: same + 1], strict=True):
            worst = max([worst, *(abs(table[token] - other[token]) for token in table.keys() & other.keys())])
    print(f"\n{name}: log-probabilities differ by {worst:.4f} at most, {compared} of {12 * len(lengths)} compared")
    assert worst <= (ROUNDED_NEAR if "kv" in name else NEAR)
    assert compared >= 12 * len(lengths) // 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_tiny(tmp_path_factory.mktemp("prompts") / "llama", **SHAPE)
    with LLM(
        model, load_format="dummy", device="cuda", dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=16,
        max_num_batched_tokens=1024, max_model_len=1024, kv_cache_memory=256 << 20,
    ) as llm:  # fmt: skip
        yield llm


def test_recordings_keep_no_tensors(llama: LLM) -> None:
    """Neither the queries of each layer nor what is between them: the next recording may use the same memory."""
    pieces = runner_of(llama)._pieces
    assert pieces is not None
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def read(length: int) -> None:
        llama.reset_prefix_cache()
        llama.generate([prompt(length)], params, use_tqdm=False)
        torch.cuda.synchronize()

    for length in (512, 256, 512):
        read(length)
    allocated, reserved, replays = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pieces.replays
    for length in [384, 320, 256, 192, 160, 128, 96, 64] * TIMES:
        read(length)
    assert pieces.replays > replays + 8 * 4
    assert sum(one.graph is not None for one in pieces.recordings._of.values()) >= 8
    assert torch.cuda.memory_allocated() - allocated <= 64 << 10
    assert torch.cuda.memory_reserved() - reserved <= 32 << 20


def test_launching_replays_waits_for_nothing(llama: LLM) -> None:
    """By torch's own check for synchronizing calls, while prompts come in beside rows that decode."""
    processor, engine = llama._processor, llama._built.engine
    runner, pieces = runner_of(llama), runner_of(llama)._pieces
    assert isinstance(pieces, PieceGraphs)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)

    def wave(number: int) -> None:
        for place, length in enumerate((40, 90, 130, 33)):
            processor.submit(processor.prepare(prompt(length, 10 * number + place), params))
            processor.step()
        while engine.has_work:
            processor.step()

    for number in range(TIMES):
        wave(number)
    before, failed, launch = pieces.replays, engine.scheduler.stats.failed_steps, runner.launch  # type: ignore[attr-defined]

    def watched(step: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")  # the engine takes an error for a failed step
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = watched  # type: ignore[method-assign]
    try:
        wave(TIMES)
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    assert pieces.replays >= before + 4
    assert engine.scheduler.stats.failed_steps == failed  # type: ignore[attr-defined]


@pytest.mark.parametrize("switch", ["cuda_graphs", "prompt_graphs"])
def test_it_is_switched_off_alone_or_with_the_other_recordings(tmp_path: Path, switch: str) -> None:
    model = write_tiny(tmp_path / "model", **SHAPE)
    with LLM(model, load_format="dummy", device="cuda", skip_tokenizer_init=True, **{switch: False}) as llm:
        runner = llm._built.engine.runner
        assert isinstance(runner, TorchRunner) and runner._pieces is None
        assert (runner._graphs is not None) == (switch == "prompt_graphs")
