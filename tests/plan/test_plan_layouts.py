"""Every layout that a plan may propose is a line that an engine takes, and computes with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import CONFIGS, shape, spec

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
sys.path.append(str(Path(__file__).parents[1] / "model"))

from group_of_threads import llm_of_threads
from rank_groups import SETTINGS
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.engine.rank_model import _rank_spec
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.stage import stages_of
from tokenmill.parallel.layout import parse_layout
from tokenmill.plan.planner.candidates import GpuFleet, splits
from tokenmill.plan.solve.gpus import GPUS
from tokenmill.plan.solve.shape import shape_of


def accept(model: DecoderSpec, gpus: int) -> list[str]:
    """The lines that are proposed for it, each of which an engine takes."""
    lines = []
    for split in splits(shape_of(model), gpus):
        line = str(split.layout)
        layout = parse_layout(line)
        assert layout == split.layout and layout.ranks == split.gpus <= gpus
        config = EngineConfig(parallel=line)
        for rank in {0, layout.ranks - 1}:
            assert len(stages_of(_rank_spec(config, model, layout, rank), layout.pp)) == layout.pp
        lines.append(line)
    assert lines[0] == "tp1" and len(set(lines)) == len(lines)
    return lines


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16, 72, 128])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layout_for_a_public_model_is_one_that_an_engine_takes(name: str, gpus: int) -> None:
    lines = accept(spec(name), gpus)
    for fleet in (GpuFleet(GPUS[kind], gpus) for kind in GPUS):
        assert {str(one.split.layout) for one in fleet.layouts(shape(name), 2)} <= set(lines)
    if gpus == 8 and name == "qwen3-30b-a3b":
        assert {"tp2", "tp8", "pp2", "tp2,pp4", "dp2,ep2", "dp8,ep8", "tp2,dp4,ep8"} <= set(lines)


sizes = st.integers(1, 9)


@settings(max_examples=200, deadline=None)
@given(
    heads=sizes, per_head=sizes, inner=st.integers(1, 99), expert=st.integers(1, 99), experts=sizes,
    shared=st.integers(0, 20), dense=st.booleans(), vocab=st.integers(1, 99), layers=st.integers(1, 40),
    moe=st.booleans(), gpus=st.sampled_from([1, 2, 3, 8, 64, 200]),
)  # fmt: skip
def test_every_layout_for_a_model_of_any_sizes_is_one_that_an_engine_takes(
    heads: int, per_head: int, inner: int, expert: int, experts: int, shared: int, dense: bool, vocab: int, layers: int,
    moe: bool, gpus: int,
) -> None:  # fmt: skip
    base = spec("qwen3-30b-a3b" if moe else "qwen3-0.6b")
    mixture = base.moe
    if mixture is not None:
        of_layers = (not dense,) + (True,) * (layers - 1)
        mixture = replace(
            mixture, intermediate=expert, experts=experts, top_k=1, shared_intermediate=shared, layers=of_layers
        )
    made = replace(
        base, heads=heads * per_head, kv_heads=heads, intermediate=inner, vocab_size=vocab, moe=mixture,
        num_layers=layers, ropes=(base.ropes[0],) * layers, windows=(base.windows[0],) * layers,
    )  # fmt: skip
    accept(made, gpus)


MIXTURE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_what_is_proposed_for_a_small_mixture_computes_what_one_rank_does(tmp_path: Path) -> None:
    """Heads, stages, experts with requests of their own, and all of these together."""
    folder = write_tiny(tmp_path, **MIXTURE)
    options = SETTINGS | {"skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]

    def said(llm: LLM) -> list[list[int]]:
        with llm:
            return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]

    alone = LLM(folder, **options)
    model = alone._built.spec
    wanted = said(alone)
    lines = accept(model, 4)
    assert {"tp2", "tp4", "pp4", "tp2,pp2", "dp2,ep2", "dp4,ep4", "tp2,dp2,ep4"} <= set(lines)
    for line in lines[1:]:
        assert said(llm_of_threads(line, model=folder, **options)) == wanted, line
