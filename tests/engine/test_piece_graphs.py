"""Steps that are replayed in pieces give what plain steps give, whatever their sizes and whatever was run before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner import piecewise
from tokenmill.engine.runner.piecewise import PieceGraphs, token_sizes, tokens_worth_recording
from tokenmill.engine.runner.recordings import PATIENCE, Recordings
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.step import POOLINGS
from tokenmill.model.families import spec_from_config
from tokenmill.processor import NO_ANSWER

# Batch-invariant ops give a token the same bits beside any padding, so that results can be compared exactly. Those of
# the native library would go unseen by a fake recording.
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 6,
    "max_num_batched_tokens": 40, "max_model_len": 128, "block_size": 8, "batch_invariant": True,
    "ops": "reference",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 20, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 4.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4,
    "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "topk_method": "greedy",
}  # fmt: skip
VECTORS = [[7] * 5, [9] * 70, [8] * 61]  # prompts whose hidden states are asked for, beside the others
Made = Callable[[LLM], PieceGraphs | None]


def runner_of(llm: LLM) -> TorchRunner:
    runner = llm._built.engine.runner  # type: ignore[attr-defined]
    assert isinstance(runner, TorchRunner)
    return runner


def in_pieces(recorder: FakeRecorder, most: int = 64) -> Made:
    def make(llm: LLM) -> PieceGraphs:
        runner = runner_of(llm)
        return PieceGraphs(runner.decoder, runner.state, most, recorder)

    return make


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """More rows than fit, prompts of one token and of several steps, tables of log-probabilities, forks."""
    prompts = [[(31 * number + 7 * place) % 120 + 3 for place in range(1 + 9 * number)] for number in range(10)]
    params = [
        SamplingParams(
            temperature=[0.0, 0.9][number % 2], seed=number, max_tokens=4 + number, ignore_eos=True, detokenize=False,
            logprobs=[None, 3][number // 2 % 2], prompt_logprobs=[None, 2][number == 5], n=[1, 2][number == 7],
            repetition_penalty=[1.0, 1.2][number == 3],
        )
        for number in range(10)
    ]  # fmt: skip
    return prompts, params


def answers(model: str, made: Made, **options: Any) -> tuple[list[Any], PieceGraphs | None]:
    with LLM(model, **OPTIONS | options) as llm:
        pieces = made(llm)
        if pieces is not None:
            runner_of(llm).forward_paths.insert(0, pieces)
        vectors = [llm._processor.prepare(prompt, NO_ANSWER, pooling=POOLINGS[len(prompt) % 2]) for prompt in VECTORS]
        for request_state in vectors:
            llm._processor.submit(request_state)
        outputs = llm.generate(*requests(), use_tqdm=False)
        assert [output.error for output in outputs if output.error] == []
        found = [(one.token_ids, one.logprobs, output.prompt_logprobs) for output in outputs for one in output.outputs]
        assert all(request_state.leader.pooled for request_state in vectors)
        return [*found, *(([], None, request_state.leader.pooled) for request_state in vectors)], pieces


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("pieces") / request.param, num_hidden_layers=3, **MODELS[request.param])


@pytest.mark.parametrize("overlap", [False, True])
def test_replayed_steps_give_the_bits_of_plain_ones(model: str, overlap: bool) -> None:
    expected, _ = answers(model, lambda llm: None, overlap=overlap)
    recorder = FakeRecorder()
    found, pieces = answers(model, in_pieces(recorder), overlap=overlap)
    assert found == expected
    assert pieces is not None and pieces.replays > 2 * pieces.plain_runs > 0
    assert len(recorder.graphs) % 3 == 0 and sum(graph.replays for graph in recorder.graphs) == 3 * pieces.replays


def test_steps_beyond_the_largest_size_are_run_plainly(model: str) -> None:
    expected, _ = answers(model, lambda llm: None)
    recorder = FakeRecorder()
    found, pieces = answers(model, in_pieces(recorder, most=8), max_num_batched_tokens=40)
    assert found == expected
    assert pieces is not None and pieces.replays > 0
    assert all(size <= 8 for size in pieces.recordings.sizes)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_size_that_cannot_be_recorded_is_run_plainly(model: str, broken: int) -> None:
    """The first recording fails, at its beginning or in the middle; the others are made."""
    expected, _ = answers(model, lambda llm: None)
    recorder = FakeRecorder(broken)
    with pytest.warns(UserWarning, match="tokens cannot be recorded and are run plainly: this cannot") as warned:
        found, pieces = answers(model, in_pieces(recorder))
    assert found == expected and pieces is not None
    refused = [one for one in pieces.recordings._of.values() if one.refused]
    assert refused and len(refused) == len(warned)
    assert all(one.uses == 2 and one.graph is None for one in refused)  # it is not tried again
    assert recorder.renewed >= 1


def test_there_are_not_more_pieces_than_the_memory_plan_counts_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = answers(model, lambda llm: None)
    monkeypatch.setattr(piecewise, "RECORDED_PIECES", 7)
    recorder = FakeRecorder()
    found, pieces = answers(model, in_pieces(recorder))
    assert found == expected and pieces is not None and pieces.replays > 0
    assert len(recorder.graphs) == 6  # two sizes of three layers


@pytest.mark.parametrize("changes", [MIXTURE, LATENT], ids=["mixture", "latent"])
def test_padding_changes_nothing_of_mixtures_and_latent_attention(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ops ask for numbers on a CPU, so nothing is recorded: the same way is gone in torch."""
    monkeypatch.setattr(PieceGraphs, "_record", lambda *arguments: None)
    model = write_tiny(tmp_path / "model", **changes)
    options = {"dtype": "float64", "batch_invariant": False}
    expected, _ = answers(model, lambda llm: None, **options)
    found, pieces = answers(model, in_pieces(FakeRecorder()), **options)
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in expected]
    assert pieces is not None and pieces.plain_runs > 20 and pieces.replays == 0
    for (_, mine, _), (_, theirs, _) in zip(found, expected, strict=True):
        for table, other in zip(mine or [], theirs or [], strict=True):
            assert {k: v.logprob for k, v in table.items()} == pytest.approx(
                {k: v.logprob for k, v in other.items()}, abs=1e-9
            )


def test_padding_stays_finite_and_writes_no_keys(model: str) -> None:
    with LLM(model, **OPTIONS) as llm:
        runner = runner_of(llm)
        pieces = in_pieces(FakeRecorder())(llm)
        assert pieces is not None
        runner.forward_paths.insert(0, pieces)
        for _ in range(3):  # plain, recorded, replayed
            pieces._mixed.fill_(float("nan"))  # as a step that overflowed would leave it
            llm.reset_prefix_cache()
            llm.generate([[5] * 13], SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
        assert pieces.replays == 2
        recorded = [one.graph for one in pieces.recordings._of.values() if one.graph is not None]
        assert len(recorded) == 1 and recorded[0].residual.shape[0] == 16
        assert recorded[0].residual.isfinite().all() and pieces._mixed[:16].isfinite().all()
        written = runner.state.arena.flatten(2, 3).ne(0).any(-1).any(-1).any(0).any(0)  # [blocks * block_size]
        assert int(written.sum()) in (13, 2 * 13, 3 * 13)  # blocks may be others each time


def test_where_kernels_change_there_is_a_size() -> None:
    """A step that is padded must not be multiplied by a kernel that is slow for as few tokens as it has."""
    from tokenmill.ops.triton.gemm import matmul, small, weight_only
    from tokenmill.ops.triton.moe import experts as moe
    from tokenmill.ops.triton.moe import route as moe_route

    sizes = token_sizes(1024)
    for few in (
        small.NARROW_ROWS, matmul.WIDE_INPUT_ROWS, matmul.TILED_ROWS - 1,
        weight_only.FEW_ROWS, weight_only.MOST_ROWS, weight_only.MOST_ROWS_OF_COSTLY,
        moe.FEW_TOKENS, moe_route.FEW_TOKENS,
    ):  # fmt: skip
        assert few in sizes
    assert all(size - before <= max(8, before // 2) for before, size in pairwise(sizes))
    assert token_sizes(0) == [] and token_sizes(30)[-1] == 24


def test_small_models_are_recorded_up_to_larger_steps_than_large_ones(tmp_path: Path) -> None:
    tiny = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "max_position_embeddings": 512}
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    large = spec_from_config(tiny | shape | {"num_hidden_layers": 32})
    small = spec_from_config(tiny | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                                     "num_attention_heads": 4, "num_key_value_heads": 2})  # fmt: skip
    assert 256 <= tokens_worth_recording(large, 8192) <= 640
    assert tokens_worth_recording(small, 8192) == 1024 and tokens_worth_recording(small, 100) == 100


def test_a_fake_recording_reads_its_inputs_anew() -> None:
    """The tests above would say little if a replay only kept what it found when it was recorded."""
    recorder, x = FakeRecorder(), torch.zeros(3)
    with recorder.recording():
        recorder.begin()
        y = (x + 1) * 2
        graph = recorder.end()
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    y.fill_(-1)
    graph.replay()
    assert y.tolist() == [4.0, 6.0, 8.0]


def test_where_nothing_more_is_recorded_larger_recordings_go_on_serving() -> None:
    recordings = Recordings[str]([160, 192], 1.5)
    recordings.serve(192)[1].graph = "recorded"
    sizes = [recordings.serve(150, may_record=False)[0] for _ in range(3 * PATIENCE)]
    assert set(sizes) == {192}
    assert recordings.serve(150)[0] == 160  # it has waited long enough for its own
