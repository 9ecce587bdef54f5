"""The engine on native ops: they are chosen, steps are recorded, and recorded steps give the tokens of plain ones."""

from __future__ import annotations

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.ops.native import library
from tokenmill.ops.registry import Need, select

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "One, two, three,", "A fox"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, min_tokens=30),
]


def test_native_ops_are_chosen_for_float32_and_only_for_it(native: library.Library) -> None:
    chosen = select(Need("cpu", torch.float32)).chosen
    assert {op for op, one in chosen.items() if one.name != "native"} == {
        "moe", "logprobs", "shape",
        "decode_inputs", "keep_sampled", "tree_inputs", "keep_tree", "move_kv", "grow_tree",  # behind the host
        "place_kv",  # once per prompt
    }  # fmt: skip
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert "native" not in {one.name for one in select(Need("cpu", dtype)).chosen.values()}


def answers(model: str, recorded: bool) -> tuple[list[list[int]], TorchRunner]:
    with LLM(model, device="cpu", cuda_graphs=recorded, max_num_seqs=8, max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert all(one.error is None for one in outputs)
        return [one.outputs[0].token_ids for one in outputs], llm._processor.engine.runner


def test_recorded_steps_give_the_tokens_of_plain_ones(native: library.Library, default_model: str) -> None:
    """Rows leave at different steps and are chosen in every way, so one graph is replayed for five numbers of rows."""
    plain, without = answers(default_model, recorded=False)
    replayed, runner = answers(default_model, recorded=True)
    assert without._recorded is None
    assert runner._recorded is not None and runner._recorded._graph is not None
    assert replayed == plain


def test_prompts_can_be_left_out_of_recording(native: library.Library, default_model: str) -> None:
    with LLM(default_model, device="cpu", prompt_graphs=False, max_num_seqs=2, max_model_len=256) as llm:
        runner = llm._processor.engine.runner
        assert runner._chunks is None and runner._recorded is not None


@pytest.mark.parametrize(("budget", "longer"), [(40, 29), (512, 47)])  # chunks beside decoding rows; whole prompts
def test_recorded_chunks_give_the_bits_of_plain_ones(
    native: library.Library, default_model: str, budget: int, longer: int
) -> None:
    prompts = [[(31 * place + 7919 * row) % 49152 for place in range(5 + longer * row)] for row in range(5)]
    params = [SamplingParams(temperature=0, max_tokens=4 + 3 * row, ignore_eos=True, logprobs=0) for row in range(5)]
    found = []
    for recorded in (False, True):
        with LLM(
            default_model, device="cpu", cuda_graphs=recorded, max_num_seqs=4, max_model_len=512,
            max_num_batched_tokens=budget,
        ) as llm:  # fmt: skip
            llm.generate([prompts[0]], params[0])  # the first step is run plainly
            outputs = llm.generate(list(prompts), params)
            found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
            runner = llm._processor.engine.runner
        assert (runner._chunks is not None) == recorded
        assert (runner._recorded is not None) == recorded
    assert runner._chunks._graphs is not None
    assert found[0] == found[1]


def test_a_recording_that_disagrees_is_not_used(
    native: library.Library, default_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.engine.runner import cpu_prompt_graphs

    real = cpu_prompt_graphs.embed  # which takes the wanted tokens out of the others: here it takes the one before
    monkeypatch.setattr(cpu_prompt_graphs, "embed", lambda ids, table: real(ids, table[1:]))
    with pytest.warns(UserWarning, match="their recording differs"):
        wrong, runner = answers(default_model, recorded=True)
    assert runner._chunks is not None and runner._chunks._refused
    assert wrong == answers(default_model, recorded=False)[0]


def test_what_is_not_packed_is_run_plainly(native: library.Library, tiny_model: str) -> None:
    settings = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    for quantization, recorded in ((None, True), ("layers.1=fp8", False)):
        with LLM(tiny_model, quantization=quantization, **settings) as llm:
            assert (llm._processor.engine.runner._recorded is not None) == recorded


def test_what_cannot_be_recorded_is_said_once_and_run_plainly(
    native: library.Library, default_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.model.decoder import Decoder, Hidden

    expected, _ = answers(default_model, recorded=False)
    embed = Decoder.embed
    monkeypatch.setattr(Decoder, "embed", lambda self, ids: Hidden(embed(self, ids).take()[0] * 1.0))
    with pytest.warns(UserWarning, match=r"run plainly: aten\.mul") as warned:
        found, runner = answers(default_model, recorded=True)
    assert len([one for one in warned if "run plainly" in str(one.message)]) == 1
    assert runner._recorded is not None and runner._recorded._graph is None
    assert found == expected
