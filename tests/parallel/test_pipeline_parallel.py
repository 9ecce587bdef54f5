"""Stages that are ranks answer as one rank does, in every way to run requests; bits, tokens, bytes and recordings."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny_models
from group_of_threads import group_of, llm_of_threads

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from exactness_ways import MODEL, PACKED, WAYS, Engines, Subject, several

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.stage import LastStage, StageRunner

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "max_model_len": 96, "max_num_seqs": 6}


@dataclass(frozen=True)
class InStages(Subject):
    """The same, by several ranks."""

    parallel: str = "pp2"

    def open(self, model: str, **options: Any) -> LLM:
        source = {"model": model, "load_format": "dummy"}
        settings: dict[str, Any] = {"max_num_seqs": 4, "block_size": 16, "max_model_len": 64, "overlap": False}
        settings |= {"enable_prefix_caching": False, "skip_tokenizer_init": True, "device": "cpu", "dtype": self.dtype}
        if "kv_cache_memory" in options:  # a stage of two has half of the layers
            options["kv_cache_memory"] //= 2
        return llm_of_threads(self.parallel, **source | settings | self.options | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 4}))
    return str(folder)


def in_stages(subject: Subject, parallel: str) -> InStages:
    return InStages(**{**vars(subject), "parallel": parallel})


OFF = {"speculation": "off"}
SUBJECTS = {
    "float64": Subject(OFF),
    "packed": replace(PACKED, options=OFF),
    "packed int4, kv int8": replace(
        PACKED, options=OFF | {"quantization": "int4-g32,layers.2=int8", "kv_cache_dtype": "int8"}
    ),
    "batch_invariant": Subject(OFF | {"batch_invariant": True}, dtype="float32", bits=True),
}
EVERY = tuple(WAYS.keys() - {"drafts"})


@pytest.mark.parametrize(
    ("subject", "parallel", "ways"),
    [
        ("float64", "pp2", EVERY),
        ("packed", "pp3", ("batch", "chunked prefill", "beams")),
        ("packed int4, kv int8", "pp2", ("batch", "n > 1")),
        ("batch_invariant", "pp4", ("batch", "chunked prefill")),
    ],
)
def test_every_way_to_run_requests_gives_the_answers_of_one_rank(
    model: str, subject: str, parallel: str, ways: tuple[str, ...]
) -> None:
    plain = SUBJECTS[subject]
    engines = Engines(in_stages(plain, parallel), model, plain)
    try:
        for name in ways:
            outcome = engines.compare(name, 1)
            assert not outcome.differ, f"{name}: requests {outcome.differ} of {outcome.answers}"
            assert not (plain.bits and outcome.other_bits), f"{name}: bits of {outcome.other_bits}"
            assert outcome.happened, f"{name} was not tried"
    finally:
        engines.close()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("deepseek-v2-lite", {}),
        ("mixtral", {}),
        ("gemma2", {}),
        ("qwen3", {"quantization": "int8,layers.1=int4"}),
        ("llama-multi-head", {"dtype": "bfloat16"}),
    ],
)
def test_latent_attention_experts_windows_and_packed_weights(
    tmp_path: Path, case: str, options: dict[str, Any]
) -> None:
    """Of a checkpoint, with the bits of one rank where one request is computed at a time."""
    tiny_models.make(case).save_pretrained(tmp_path)
    asked = several(Random(case), 5)
    found = []
    for parallel in (None, "pp3"):
        opened = LLM if parallel is None else llm_of_threads
        settings = OPTIONS | OFF | {"max_num_seqs": 1, "dtype": "float32", "max_num_batched_tokens": 64} | options
        with opened(model=str(tmp_path), parallel=parallel, **settings) as llm:
            outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert found[0] == found[1]


def test_what_stages_hand_on_is_one_row_of_floats_per_token_and_every_step_is_a_recording(model: str) -> None:
    with llm_of_threads("pp3", model=model, load_format="dummy", **OPTIONS) as llm:
        group = group_of(llm)
        params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)
        outputs = llm.generate([[5, 6, 7, 8], [9] * 40, [10, 11]], params, use_tqdm=False)
        stats = llm._built.engine.scheduler.stats
        assert stats.tokens == sum(len(one.prompt_token_ids) + 9 - 1 for one in outputs)
        handed = stats.tokens * MODEL["hidden_size"] * 4
        answers = 8 * (stats.steps + 3 * 9)  # how many bytes follow, and a token for each that was sampled
        first, middle, last = (one.bytes for one in group.communicators)
        assert (first["send"], first["receive"]) == (handed, answers)
        assert (middle["send"], middle["receive"]) == (handed, handed)
        assert (last["send"], last["receive"]) == (answers, handed)
        assert [type(one) for one in group.runners] == [StageRunner, StageRunner, LastStage]
        layers = [len(one.state.kv) for one in group.runners[:2]] + [len(group.runners[2].runner.state.kv)]
        assert sum(layers) == 4 and min(layers) == 1, "keys and values of its own layers only"
        for stage in group.runners[:2]:
            assert stage._recorded._graph is not None
        assert group.runners[2].runner._recorded._graph is not None
