"""No plan that is called feasible runs out of memory: against what the allocator hands out, and against recounts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import plan_models
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.engine.choices import model_bytes
from tokenmill.errors import ConfigError
from tokenmill.model.spec import DecoderSpec
from tokenmill.plan.planner.candidates import BLOCK, GpuFleet, layout_element_bytes, placements
from tokenmill.plan.planner.precision import ITEMSIZE, rank_bytes
from tokenmill.plan.solve.gpus import GPUS
from tokenmill.plan.solve.hardware import Hardware
from tokenmill.plan.solve.memory import ATTENTION_WORKSPACE
from tokenmill.plan.solve.settings import solve
from tokenmill.plan.solve.shape import ONE_GPU
from tokenmill.quant.schemes.packed import Packed

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that torch's CPU allocator still holds of what it handed out during `work`, and the most at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = work()
    live = peak = 0
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del kept
    return live, peak


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    hidden=st.sampled_from([32, 64, 192]),
    inner=st.sampled_from([48, 500]),
    heads=st.sampled_from([(4, 2), (4, 4), (8, 1)]),
    vocab=st.sampled_from([128, 1500, 6000]),
    tied=st.booleans(),
    rows=st.integers(1, 12),
    tokens=st.integers(12, 400),
    length=st.integers(40, 300),
    sampled=st.booleans(),
)
def test_an_engine_allocates_no_more_than_its_plan(
    tmp_path_factory, hidden, inner, heads, vocab, tied, rows, tokens, length, sampled
):
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads[0], "head_dim": 16}
    sizes |= {"num_key_value_heads": heads[1], "vocab_size": vocab, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(TINY | sizes))
    made: list[LLM] = []

    def load() -> None:
        made.append(
            LLM(
                str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=rows,
                max_num_batched_tokens=tokens, max_model_len=length, kv_cache_memory=4 << 20,
            )
        )  # fmt: skip

    resident, _ = allocated(load)
    llm = made[0]
    plan, chosen = llm._built.settings.memory, llm._built.settings
    runner = llm._built.engine.runner
    assert runner.state.arena.nbytes == plan.kv
    source = random.Random(1)
    prompts = [[source.randrange(vocab) for _ in range(length - 8)] for _ in range(2 * rows)]
    params = SamplingParams(temperature=1.0 if sampled else 0.0, top_p=0.9, top_k=30, max_tokens=8, ignore_eos=True,
                            detokenize=False)  # fmt: skip
    _, peak = allocated(lambda: llm.generate(prompts, params, use_tqdm=False))
    # Attention's scratch has a bound of its own in the plan, far above a tiny model's. The native op's is not torch's;
    # plain torch has the scores of the largest chunk, a few copies of them.
    native = runner.decoder.ops.chosen["attention"].name == "native"
    scores = 0 if native else 6 * 4 * heads[0] * min(tokens, length) * length
    planned = plan.weights + plan.activations + plan.workspace - ATTENTION_WORKSPACE["cpu"] + scores
    books = 96 * chosen.max_step_tokens + 512 * chosen.max_rows + 16_384  # integers of a step, and torch's own crumbs
    packed = packed_bytes(runner.decoder)
    if packed:  # nor is the room for inputs of its products torch's
        planned -= chosen.max_step_tokens * Packed().input_bytes(max(hidden, inner, 16 * heads[0]))
    assert resident + packed + peak <= planned + books


def packed_bytes(decoder):
    """Weights in the native library's memory, which torch does not count."""
    weights, layers = decoder.weights, range(decoder.spec.num_layers)
    linears = [weights.embed, weights.lm_head, *(one for index in layers for one in weights.layer(index).linears())]
    packed = {id(one.storage): one.storage for one in linears if isinstance(getattr(one, "scheme", None), Packed)}
    return sum(panels.nbytes for storage in packed.values() for panels in storage.values())


def test_the_count_sees_what_a_plan_forgets(tmp_path, monkeypatch):
    """A plan that forgets what is alive inside a layer is caught: the test above can fail."""
    monkeypatch.setattr(DecoderSpec, "activation_elements", 0)
    with pytest.raises(AssertionError):
        test_an_engine_allocates_no_more_than_its_plan.hypothesis.inner_test(
            _Folders(tmp_path), 64, 500, (4, 2), 128, True, 2, 400, 300, True
        )


class _Folders:
    def __init__(self, path):
        self.path = path

    def mktemp(self, name):
        return self.path


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(plan_models.CONFIGS)),
    gpu=st.sampled_from(sorted(GPUS)),
    count=st.sampled_from([1, 2, 4, 8]),
    pick=st.integers(0, 10_000),
    longest=st.integers(100, 40_000),
)
def test_every_rank_of_a_feasible_layout_fits_its_gpu(name, gpu, count, pick, longest):
    """Weights and cache are counted again, parameter by parameter, for the rank that has the most."""
    spec, shape = plan_models.spec(name), plan_models.shape(name)
    fleet = GpuFleet(GPUS[gpu], count)
    layouts = list(fleet.layouts(shape, 2))
    layout = layouts[pick % len(layouts)]
    found, reason = placements(fleet, shape, layout, longest)
    if not found:
        assert "does not fit" in reason
        assume(False)
    split, itemsize = layout.split, ITEMSIZE[layout.dtype]
    most = 0.0
    for stage in range(split.pipeline):
        stages = range(
            stage * -(-spec.num_layers // split.pipeline), (stage + 1) * -(-spec.num_layers // split.pipeline)
        )
        held = 0.0
        for key, param in spec.parameters().items():
            if key.startswith("layers.") and int(key.split(".")[1]) not in stages:
                continue
            if (key == "embed" and stage) or (key in ("lm_head", "final_norm") and stage < split.pipeline - 1):
                continue
            size = (layout.weights.weight_bytes or itemsize) if param.kind in ("linear", "experts") else itemsize
            size = itemsize if key == "lm_head" else size
            ranks = split.tensor * (split.expert if ".experts_" in key else 1)
            held += param.numel * size / (ranks if param.kind in ("linear", "stacked", "experts", "embedding") else 1)
        most = max(most, held)
    element_bytes = layout_element_bytes(shape, layout)
    heads = math.ceil(shape.kv_heads / split.tensor) / shape.kv_heads
    layers = math.ceil(spec.num_layers / split.pipeline) / spec.num_layers
    for fit in found:
        tokens = fit.room.kv_tokens / split.expert
        cache = tokens * shape.kv_elements * element_bytes.kv * heads * layers
        logits = fit.room.max_rows * shape.vocab * (itemsize + 4)
        assert most + cache + logits < GPUS[gpu].memory * 0.9
        assert fit.memory.total <= fit.memory.budget
        assert fit.memory.num_blocks * BLOCK >= longest  # the longest request can run


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3-8b", "qwen3-30b-a3b"])
def test_a_rank_alone_is_the_engine_itself(name):
    """Without torch the planner counts what the engine will count with it."""
    spec, shape = plan_models.spec(name), plan_models.shape(name)
    layout = next(iter(GpuFleet(GPUS["h200"], 1).layouts(shape, 0)))
    mine = rank_bytes(shape, layout_element_bytes(shape, layout), ONE_GPU, 2)
    theirs = model_bytes(spec, torch.bfloat16, guarded=True)
    assert theirs.guard <= mine.guard < theirs.guard * 1.01
    assert theirs.guard_per_token <= mine.guard_per_token <= theirs.guard_per_token + 1
    assert theirs.weights <= mine.weights < theirs.weights * 1.01
    assert theirs.kv_per_token <= mine.kv_per_token <= theirs.kv_per_token + 1
    assert theirs.activation_per_token <= mine.activation_per_token <= theirs.activation_per_token + 1
    assert (mine.vocab, mine.logits_per_row) == (theirs.vocab, theirs.logits_per_row)


def test_sizes_of_a_plan_are_accepted_by_the_engine():
    """What the planner placed, the engine's own solver accepts on such a GPU."""
    spec, shape = plan_models.spec("llama3-8b"), plan_models.shape("llama3-8b")
    fleet = GpuFleet(GPUS["l4"], 1)
    for layout in fleet.layouts(shape, 0):
        for fit in placements(fleet, shape, layout, 4096)[0]:
            config = EngineConfig(
                max_num_seqs=fit.room.max_rows, max_num_batched_tokens=fit.room.step_tokens, max_model_len=4096
            )
            hardware = Hardware("cuda", "l4", GPUS["l4"].memory, GPUS["l4"].memory)
            solved = solve(config, model_bytes(spec, torch.bfloat16, guarded=True), spec.max_positions, hardware)
            assert solved.num_blocks >= fit.memory.num_blocks
    with pytest.raises(ConfigError, match="does not fit"):
        fleet.place(shape, layout, longest=100_000, rows=1024, step_tokens=16384)
