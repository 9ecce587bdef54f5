"""Pruned keys and values: what a token sees is a function of its prefix, and what stays is what the policy says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import LLM, SamplingParams
from tokenmill.draft.states import packed
from tokenmill.engine.runner.pruner import unrotated
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.errors import ConfigError
from tokenmill.kv.pruning import Pruning
from tokenmill.ops.reference import rotated

LENGTH = 448
PRUNED: dict[str, Any] = {
    "dtype": "float64", "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 1,
    "max_num_batched_tokens": 512, "overlap": False, "enable_prefix_caching": False, "kv_pruning": "keynorm",
    "kv_pruning_window": 32, "max_model_len": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def long_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model, for longer texts."""
    import json
    import shutil
    from pathlib import Path

    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model, folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 512}))
    return str(folder)


def runner_of(llm: LLM) -> TorchRunner:
    runner = llm._processor.engine.runner
    assert isinstance(runner, TorchRunner)
    return runner


def text(seed: int, length: int) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def under_mask(llm: LLM, ids: list[int], pruning: Pruning) -> torch.Tensor:
    """Logits of every position by dense attention, with the mask written down token by token."""
    runner = runner_of(llm)
    decoder, spec = runner.decoder, runner.decoder.spec
    n, group = len(ids), spec.heads // spec.kv_heads
    state = runner.state
    tokens = packed([n], torch.tensor(ids), state.block_size, state.max_blocks)

    def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
        k, v = (one.flatten(0, 1)[tokens.slots] for one in (state.kv[layer].k, state.kv[layer].v))
        alive = torch.ones(spec.kv_heads, n, dtype=torch.bool)
        seen = torch.zeros(spec.kv_heads, n, n, dtype=torch.bool)
        for query in range(n):
            gone = pruning.segments(pruning.at(query))
            if gone:
                first = pruning.sinks + (gone - 1) * pruning.segment
                part = slice(first, first + pruning.segment)
                norms = k[part].norm(dim=-1).T
                alive[:, part] = False
                if pruning.kept:
                    alive.scatter_(1, (-norms).topk(pruning.kept, 1).indices + first, True)
            seen[:, query, : query + 1] = alive[:, : query + 1]
        scores = torch.einsum("qhgd,khd->hgqk", q.view(n, spec.kv_heads, group, -1), k) * spec.attn_scale
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("hgqk,khd->qhgd", weights, v).reshape(n, spec.heads, -1)

    tokens.attend = attend
    with torch.inference_mode():
        return decoder.logits(decoder.forward(tokens, state.kv)).log_softmax(-1)


def scored(llm: LLM, prompts: list[list[int]], max_tokens: int = 40) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False)
    found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm._processor.engine.scheduler.check_integrity()
    return [
        (list(one.token_ids), [at[token].logprob for at, token in zip(one.logprobs or [], one.token_ids, strict=True)])
        for one in found
    ]


@pytest.mark.parametrize("policy", ["keynorm", "window"])
@pytest.mark.parametrize("ops", [None, "reference"])
def test_what_a_token_sees_is_what_the_mask_says(long_model: str, policy: str, ops: str | None) -> None:
    """Prompts in chunks, then decodes through two more compactions, against one dense pass over all of it."""
    prompt = text(1, 300)
    with LLM(long_model, **PRUNED | {"kv_pruning": policy, "ops": ops}) as llm:
        said, logprobs = scored(llm, [prompt], max_tokens=LENGTH - 300)[0]
        pruning = llm._processor.engine.scheduler.kv.pruning
        assert pruning is not None and pruning.at(LENGTH) > pruning.at(300) > 0
        dense = under_mask(llm, prompt + said[:-1], pruning)[299:]
    assert dense.argmax(-1).tolist() == said
    assert torch.allclose(dense.gather(1, torch.tensor(said)[:, None])[:, 0], torch.tensor(logprobs, dtype=dense.dtype))


def test_the_mask_matters(long_model: str) -> None:
    """Guards the test above: a pass that drops nothing says something else."""
    with LLM(long_model, **PRUNED) as llm, LLM(long_model, **PRUNED | {"kv_pruning": None}) as whole:
        assert scored(llm, [text(1, 300)]) != scored(whole, [text(1, 300)])


WAYS: dict[str, dict[str, Any]] = {
    "one row": {},
    "many rows, one step behind": {"max_num_seqs": 16, "overlap": True},
    "small chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 48},
    "prefix cache": {"max_num_seqs": 8, "enable_prefix_caching": True},
    "small memory": {"max_num_seqs": 8, "enable_prefix_caching": True, "kv_cache_memory": 60 * 16 * 2 * 2 * 2 * 8 * 4},
}


@pytest.fixture(scope="module")
def ways(long_model: str) -> dict[str, LLM]:
    bits = {"batch_invariant": True, "dtype": "float32"}
    return {name: LLM(long_model, **PRUNED | bits | way) for name, way in WAYS.items()}


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seeds=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(1, 60)), min_size=1, max_size=5),
)
def test_the_same_bits_in_any_chunks_batch_or_from_the_prefix_cache(
    ways: dict[str, LLM], seeds: list[tuple[int, int, int]]
) -> None:
    prompts = [text(seed, 400)[:shared] + text(9 + own, own) for seed, shared, own in seeds]
    expected = scored(ways["one row"], prompts)
    for name, llm in ways.items():
        assert scored(llm, prompts) == expected, name
        if llm.config.enable_prefix_caching:
            assert scored(llm, prompts) == expected, f"{name}, warm"


def test_the_prefix_cache_finds_what_was_pruned(ways: dict[str, LLM]) -> None:
    """Guards the test above."""
    llm = ways["prefix cache"]
    scored(llm, [text(77, 400)])
    stats = llm._processor.engine.scheduler.kv.stats
    before, gone = stats.hit, stats.pruned
    scored(llm, [[*text(77, 400), 5]])
    assert stats.hit - before >= 384
    assert stats.pruned == gone


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_codes_are_moved_as_they_are(long_model: str, form: str) -> None:
    whole = PRUNED | {"dtype": "float32", "kv_cache_dtype": form, "ops": "reference"}
    with LLM(long_model, **whole) as llm:
        runner, prompt = runner_of(llm), text(3, 300)
        scored(llm, [prompt], max_tokens=1)
        assert runner.pruner is not None
        arena, scales = runner.state.arena, runner.state.scales
        assert scales is not None
        sources, targets = (1, 2, 3, 4, 5, 6, 7, 8), (20, 21, 22, 23)
        old = [one[:, :, list(sources)].flatten(2, 3).clone() for one in (arena, scales)]
        from tokenmill.kv.pruning import Compaction

        runner.pruner.compact([Compaction(sources, targets, 16)])
        new = [one[:, :, list(targets)].flatten(2, 3) for one in (arena, scales)]
    for layer in range(arena.shape[0]):
        for head in range(arena.shape[4]):
            before = torch.cat([one[layer, part, :, head].float() for one in old for part in (0, 1)], dim=1)
            after = torch.cat([one[layer, part, :, head].float() for one in new for part in (0, 1)], dim=1)
            rows = [row.tolist() for row in before]
            at = [rows.index(row.tolist()) for row in after]
            assert at == sorted(at) and len(set(at)) == 64, "whole tokens, each once, in their order"


def test_keys_are_unrotated_as_they_were_rotated(long_model: str) -> None:
    with LLM(long_model, **PRUNED) as llm:
        table = runner_of(llm).decoder.rope_tables[0]
    k = torch.randn(20, 2, table.shape[1], dtype=torch.float64)
    assert torch.allclose(unrotated(rotated(k, table, torch.arange(100, 120)), table, 100), k, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_pruning_keep": 0.3}, r"kv_pruning_keep is 0.3, which leaves 38.4 of the 128 tokens.*multiple of 0.125"),
        ({"kv_pruning": "gate"}, "no gate comes with this model; take keynorm"),
        ({"speculation": "suffix"}, "kv_pruning is 'keynorm' and speculation is 'suffix'.*leave one of them out"),
        ({"eviction": "lfu"}, "eviction is 'lfu', which do not go together"),
        ({"kv_host_memory": 1 << 20}, "kv_host_memory is 1048576, which do not go together"),
        ({"parallel": "tp2"}, "parallel is 'tp2', which do not go together"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill is False"),
        ({"batching": "static"}, "batching is 'static'"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(
    long_model: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(long_model, **PRUNED | options)


def test_the_shipped_gate_prunes_the_default_model(default_model: str) -> None:
    """Recorded decode steps included; and what it says does not change from the prefix cache."""
    prompt = list(range(100, 500))
    options = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 512, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    with LLM(default_model, kv_pruning="gate", **options) as llm:
        assert any(line.startswith("pruning      gate") for line in llm.plan_lines())
        cold = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
        assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == cold
        assert llm._processor.engine.scheduler.kv.stats.pruned > 0
