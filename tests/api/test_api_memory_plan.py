"""The memory plan: what it calls feasible fits, what it refuses comes with numbers, and steps stay within it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_memory import largest_step, peak_bytes

from tokenmill import LLM, EngineConfig, SamplingParams
from tokenmill.engine.choices import model_bytes
from tokenmill.errors import ConfigError
from tokenmill.model.families import spec_from_config
from tokenmill.plan.solve.hardware import GIB, Hardware, cpu_hardware
from tokenmill.plan.solve.memory import ATTENTION_WORKSPACE, MemoryPlan, ModelBytes, plan_memory
from tokenmill.plan.solve.settings import SolvedSettings, solve
from tokenmill.quant.schemes.scheme import Linear

# Plans


@st.composite
def cases(draw: st.DrawFn) -> tuple[EngineConfig, ModelBytes, int, Hardware]:
    """Any model on any machine, with any part of the settings left open."""
    device = draw(st.sampled_from(["cpu", "cuda"]))
    total = draw(st.integers(1, 200)) * GIB
    hardware = Hardware(device, "a machine", total, int(total * draw(st.floats(0, 1))))
    vocab = draw(st.integers(100, 300_000))
    model = ModelBytes(
        weights=draw(st.integers(10**6, 10**11)),
        kv_per_token=draw(st.integers(64, 10**6)),
        activation_per_token=draw(st.integers(100, 10**6)),
        logits_per_row=vocab * 8,
        vocab=vocab,
    )
    longest = draw(st.integers(16, 200_000))
    rows = draw(st.none() | st.integers(1, 1024))
    config = EngineConfig(
        max_model_len=draw(st.none() | st.integers(1, longest)),
        max_num_seqs=rows,
        max_num_batched_tokens=draw(st.none() | st.integers(rows or 1, 20_000)),
        block_size=draw(st.none() | st.sampled_from([1, 8, 16, 32, 128])),
        kv_cache_memory=draw(st.none() | st.integers(1, 2 * total)),
        gpu_memory_utilization=draw(st.floats(0.05, 1)),
    )
    return config, model, longest, hardware


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recordings_of_prompts_are_planned_for_only_where_there_are_some(device: str) -> None:
    model = ModelBytes(weights=GIB, kv_per_token=10**5, activation_per_token=10**5, logits_per_row=10**6, vocab=10**5)
    hardware = Hardware(device, "a machine", 80 * GIB, 80 * GIB)
    on, off, none = (
        solve(EngineConfig(**switches), model, 4096, hardware).memory.workspace
        for switches in ({}, {"prompt_graphs": False}, {"cuda_graphs": False})
    )
    assert off == none < on


@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_a_plan_that_is_called_feasible_is(case: tuple[EngineConfig, ModelBytes, int, Hardware]) -> None:
    config, model, longest, hardware = case
    try:
        plan = solve(config, model, longest, hardware)
    except ConfigError as refusal:
        assert "\n" not in str(refusal) and ("fit" in str(refusal) or "kv_cache_memory" in str(refusal))
        return
    memory = plan.memory
    assert memory.total <= memory.budget <= hardware.free_bytes
    assert min(memory.weights, memory.kv, memory.activations, memory.workspace) > 0
    assert memory.kv == plan.num_blocks * plan.block_size * model.kv_per_token
    assert plan.num_blocks * plan.block_size >= plan.max_len  # one request of full length fits
    assert 1 <= plan.max_len <= longest and plan.max_step_tokens >= plan.max_rows
    assert_respected(config, plan)
    lines = memory.lines(plan.num_blocks * plan.block_size)
    assert [line.split("  ")[0] for line in lines] == ["weights", "kv cache", "activations", "workspace", "in all"]
    assert len(plan.reasons) == 4 and all(reason.endswith(")") for reason in plan.reasons)


def assert_respected(config: EngineConfig, plan: SolvedSettings) -> None:
    """What the user sets is what the plan says."""
    chosen = {
        "max_model_len": plan.max_len,
        "max_num_seqs": plan.max_rows,
        "max_num_batched_tokens": plan.max_step_tokens,
        "block_size": plan.block_size,
    }
    for name, value in chosen.items():
        asked = getattr(config, name)
        assert asked is None or asked == value
        reason = next(reason for reason in plan.reasons if reason.startswith(f"{name} = {value}  ("))
        assert ("as set" in reason) == (asked is not None)
    if config.kv_cache_memory is not None:
        assert plan.memory.kv <= config.kv_cache_memory


SMALL = ModelBytes(
    weights=GIB, kv_per_token=1 << 16, activation_per_token=1 << 14, logits_per_row=1 << 20, vocab=1 << 17
)


def test_a_refusal_names_the_numbers_and_a_smaller_wish_is_granted() -> None:
    machine = Hardware("cpu", "2 cores", 4 * GIB, 4 * GIB)
    with pytest.raises(ConfigError) as refusal:
        solve(EngineConfig(max_num_seqs=512), SMALL, 4096, machine)
    for words in ("1.00 GiB weights", "activations", "workspace", "4.00 GiB", "2 cores", "or max_num_seqs"):
        assert words in str(refusal.value)
    assert solve(EngineConfig(max_num_seqs=64), SMALL, 4096, machine).max_rows == 64


def test_a_length_that_does_not_fit_is_cut_when_unset_and_refused_when_set() -> None:
    machine = Hardware("cpu", "2 cores", 4 * GIB, 4 * GIB)
    plan = solve(EngineConfig(), SMALL, 10**6, machine)
    assert plan.max_len < 10**6 and "the kv cache ends there" in " ".join(plan.reasons)
    with pytest.raises(ConfigError, match=r"does not fit.*lower max_model_len"):
        solve(EngineConfig(max_model_len=10**6), SMALL, 10**6, machine)


def test_memory_that_others_use_on_a_gpu_is_not_planned_with() -> None:
    def kv(free: int) -> int:
        return solve(EngineConfig(), SMALL, 131_072, Hardware("cuda", "a GPU", 80 * GIB, free)).memory.kv

    assert kv(80 * GIB) - kv(60 * GIB) == pytest.approx(20 * GIB, abs=1 << 21)


def test_this_machines_memory_is_known() -> None:
    hardware = cpu_hardware()
    assert 0 < hardware.free_bytes <= hardware.total_bytes and "cores" in hardware.name


# Steps


def open_dummy(folder: Path, base: str, changes: dict[str, Any], **options: Any) -> LLM:
    folder.mkdir()
    config = json.loads((Path(base) / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", **options)


WIDE = {"hidden_size": 192, "intermediate_size": 576, "head_dim": 24, "max_position_embeddings": 2048}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 24,
    "sliding_window": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}


def test_the_measure_itself_sees_what_is_alive_at_once() -> None:
    import torch

    def work() -> None:
        for _ in range(3):
            torch.ones(1 << 20)  # freed before the next one is made
        kept = [torch.ones(1 << 20) for _ in range(2)]
        del kept

    assert 8 << 20 <= peak_bytes(work)[1] < 9 << 20


@pytest.mark.parametrize("read", [None, 0])  # of its tokens: the last one's hidden state, or all of them
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [{}, QWEN3, MIXTRAL], ids=["llama", "qwen3", "mixtral"])
def test_a_step_full_of_prompt_stays_within_its_planned_activations(
    tiny_model: str, tmp_path: Path, family: dict[str, Any], dtype: str, read: int | None
) -> None:
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "kv_cache_memory": 64 << 20, "dtype": dtype}
    options["adaptive_precision"] = False  # what it may need is another test's
    with open_dummy(tmp_path / "wide", tiny_model, WIDE | family, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=read)
        peak, tokens, _ = largest_step(llm, [[7] * 1500], params)
        planned = llm._built.settings.memory.activations
    assert tokens == 1024
    unseen = family is MIXTRAL and dtype == "float32"  # what experts need is the native library's own memory
    assert planned / (12 if unseen else 3) < peak <= planned  # and the plan is not far off, either


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_whose_states_are_pooled_stays_within_its_planned_activations(
    tiny_model: str, tmp_path: Path, dtype: str, pooling: str
) -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "kv_cache_memory": 64 << 20, "dtype": dtype}
    with open_dummy(tmp_path / "wide", tiny_model, WIDE, adaptive_precision=False, **options) as llm:
        peak, tokens, _ = largest_step(llm, [[7] * 1024, *([9] * 128 for _ in range(8))], None, pooling)
        planned = llm._built.settings.memory.activations
    assert tokens == 1024 and peak <= planned


def test_attention_that_keeps_its_scores_stays_within_its_planned_workspace(tiny_model: str, tmp_path: Path) -> None:
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "kv_cache_memory": 64 << 20, "dtype": "float32"}
    with open_dummy(tmp_path / "gemma", tiny_model, WIDE | GEMMA, **options) as llm:
        peak, tokens, _ = largest_step(llm, [[7] * 1500], SamplingParams(temperature=0, max_tokens=1))
        planned = llm._built.settings.memory.activations
    assert tokens == 1024 and peak <= planned + ATTENTION_WORKSPACE["cpu"]


EVERYTHING: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 1000,
    "top_p": 0.95,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "min_tokens": 1,
    "logprobs": 20,
    "seed": 1,
    "max_tokens": 2,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_step_that_samples_every_row_in_every_way_stays_within_its_plan(
    tiny_model: str, tmp_path: Path, dtype: str
) -> None:
    rows = 32
    options = {"max_num_seqs": rows, "max_num_batched_tokens": 64, "dtype": dtype, "kv_cache_memory": 64 << 20}
    with open_dummy(tmp_path / "vocabulary", tiny_model, {"vocab_size": 30_000}, **options) as llm:
        prompts = [[7 + row, 9] for row in range(rows)]
        peak, _, samples = largest_step(llm, prompts, SamplingParams(**EVERYTHING))
        planned = llm._built.settings.memory.activations
    assert samples == rows
    assert planned / 4 < peak <= planned


def test_prompt_logprobs_stay_within_the_plan(tiny_model: str, tmp_path: Path) -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "dtype": "float32", "kv_cache_memory": 64 << 20}
    with open_dummy(tmp_path / "vocabulary", tiny_model, {"vocab_size": 30_000}, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
        peak, tokens, _ = largest_step(llm, [[7] * 500], params)
        assert tokens == 500 and peak <= llm._built.settings.memory.activations


def test_float32_copies_of_a_narrow_model_are_planned_to_the_byte(tiny_model: str) -> None:
    import torch

    config = json.loads((Path(tiny_model) / "config.json").read_text()) | WIDE | MIXTRAL | {"vocab_size": 30_000}
    spec = spec_from_config(config)
    unguarded, guarded = (model_bytes(spec, torch.bfloat16, guarded=one) for one in (False, True))
    assert (unguarded.guard, unguarded.guard_per_token) == (0, 0)
    experts, router, norms = 4 * 3 * 576 * 192, 4 * 192, 2 * 192
    assert guarded.guard == 4 * 30_000 * 192 + 4 * experts + 8 * (router + norms)
    assert guarded.guard_per_token == 2 * spec.activation_elements
    large = dataclasses.replace(spec, vocab_size=1 << 20)  # no matrix is widened whole beyond some size
    assert model_bytes(large, torch.bfloat16, guarded=True).guard == (64 << 20) + 4 * experts + 8 * (router + norms)
    machine = Hardware("cuda", "a GPU", 80 * GIB, 80 * GIB)
    plain, careful = (solve(EngineConfig(), one, 2048, machine) for one in (unguarded, guarded))
    tables = guarded.rope_per_position * 2048
    expected = guarded.guard + tables + careful.max_step_tokens * guarded.guard_per_token
    assert careful.memory.guard == expected and plain.memory.guard == 0
    fixed = [one.memory.activations + one.memory.workspace for one in (plain, careful)]
    assert fixed[1] - fixed[0] == expected
    assert any("adaptive_precision" in line for line in careful.memory.lines(1))
    assert not any("adaptive_precision" in line for line in plain.memory.lines(1))
    with pytest.raises(ConfigError, match="set adaptive_precision=False"):
        solve(EngineConfig(), guarded, 2048, Hardware("cpu", "2 cores", 200 << 20, 200 << 20))


@pytest.mark.parametrize("at_once", [64 << 20, 1 << 20])
@pytest.mark.parametrize("tokens", [16, 1024])
@pytest.mark.parametrize("family", [{}, MIXTRAL], ids=["llama", "mixtral"])
def test_a_step_in_float32_stays_within_the_plan_of_a_narrow_model(
    tiny_model: str, tmp_path: Path, family: dict[str, Any], tokens: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 30,000 rows is 23 MB in float32: far more than the activations of few tokens."""
    monkeypatch.setattr("tokenmill.plan.solve.memory.WIDENED_AT_ONCE", at_once)
    monkeypatch.setattr("tokenmill.engine.runner.guard.WIDENED_AT_ONCE", at_once)
    options = {"max_num_seqs": 1, "max_num_batched_tokens": tokens, "kv_cache_memory": 64 << 20, "dtype": "bfloat16"}
    with open_dummy(tmp_path / "narrow", tiny_model, WIDE | family | {"vocab_size": 30_000}, **options) as llm:
        runner, memory = llm._processor.engine.runner, llm._built.settings.memory
        launch = runner.launch

        def widened(step: Any) -> Any:
            step.in_float32 = list(range(len(step.rows)))
            return launch(step)

        runner.launch = widened  # type: ignore[method-assign]
        peak, most, _ = largest_step(llm, [[7] * 1030], SamplingParams(temperature=0, max_tokens=3))
        wider = tokens * 2 * llm._built.spec.activation_elements  # which is among the activations
    assert most == tokens and memory.guard > wider
    planned = memory.activations + memory.guard - wider
    assert planned / 3 < peak <= planned
    if tokens == 16 and at_once > 4 * 30_000 * 192:
        assert peak > memory.activations, "what this is about"


def test_the_default_model_stays_within_its_planned_activations(default_model: str) -> None:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "dtype": "float32"}
    with LLM(default_model, device="cpu", **options) as llm:
        memory = llm._built.settings.memory
        prompts = [[500 + row] * 16 for row in range(16)]
        peak, tokens, samples = largest_step(llm, prompts, SamplingParams(**EVERYTHING | {"bad_words": ["mill"]}))
        assert (tokens, samples) == (256, 16)
        assert peak <= memory.activations
        weights = llm._processor.engine.runner.decoder.weights  # type: ignore[attr-defined]
        embed = weights.embed.storage.values() if isinstance(weights.embed, Linear) else [weights.embed]
        held = {id(tensor): tensor.nbytes for tensor in (*embed, weights.final_norm)}
        for index in range(llm._built.spec.num_layers):
            layer = weights.layer(index)
            linears = (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
            stored = [tensor for linear in linears for tensor in linear.storage.values()]
            held |= {id(tensor): tensor.nbytes for tensor in (*stored, layer.before_attention, layer.before_mlp)}
        assert sum(held.values()) == memory.weights


@pytest.mark.parametrize(("flops_per_token", "expected"), [(1e9, 16384), (1.4e10, 8192), (0.0, 8192)])
def test_a_gpu_step_takes_more_tokens_where_the_model_is_small(flops_per_token: float, expected: int) -> None:
    """Running answers wait for a step of prompts, so it may not take long; a small model needs fewer launches."""
    model = dataclasses.replace(SMALL, flops_per_token=flops_per_token)
    hardware = Hardware("cuda", "a large GPU", 140 << 30, 139 << 30)
    assert solve(EngineConfig(), model, 8192, hardware).max_step_tokens == expected


LAYERED = ModelBytes(40 * GIB, 10**5, 10**5, 10**6, 10**5, layers=(GIB,) * 38)


@given(free=st.integers(1, 60), kv=st.none() | st.integers(1, 30), where=st.sampled_from(["cpu", "cuda"]))
def test_layers_are_streamed_where_they_have_to_be_and_no_more(free: int, kv: int | None, where: str) -> None:
    def planned(offload: int | None) -> MemoryPlan:
        machine = Hardware(where, "a machine", 64 * GIB, 64 * GIB)
        sizes = {"block_size": 16, "max_rows": 8, "max_step_tokens": 64, "max_len": 1024, "longest": 4096}
        kv_bytes = None if kv is None else kv * GIB
        return plan_memory(
            LAYERED, machine, utilization=1.0, kv_bytes=kv_bytes, max_memory=free * GIB, offload=offload, **sizes
        )[0]

    try:
        whole = planned(0)
    except ConfigError:
        whole = None
    try:
        plan = planned(None)
    except ConfigError as error:
        assert whole is None and "does not fit" in str(error)
        assert free <= 5 + (kv or 1)  # all but two layers' room may be away
        return
    assert plan.total <= plan.budget <= free * GIB
    assert (plan == whole) if whole is not None else plan.streamed.layers
    assert plan.weights == LAYERED.weights - plan.streamed.freed
    assert plan.kv >= 1024 * 10**5
