"""Which cached block is given up changes no token."""

from __future__ import annotations

import random

import pytest
from test_exactness_kv import ALONE

from tokenmill import LLM, SamplingParams

BLOCKS = 40


@pytest.mark.parametrize("eviction", ["lfu", "cost", "learned"])
def test_conversations_that_push_each_other_out_say_what_they_would_alone(tiny_model: str, eviction: str) -> None:
    source = random.Random(4)
    system = [source.randrange(3, 90) for _ in range(24)]
    talks = [system + [source.randrange(3, 90) for _ in range(source.randint(5, 40))] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    common = ALONE | {"dtype": "float64", "device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    room = {"max_model_len": 256, "block_size": 8, "kv_cache_memory": BLOCKS * 8 * 2 * 2 * 2 * 8 * 8}
    with (
        LLM(tiny_model, **common) as alone,
        LLM(tiny_model, **common | room | {"enable_prefix_caching": True, "eviction": eviction}) as llm,
    ):
        lines = [line for line in llm.plan_lines() if line.startswith("eviction")]
        assert len(lines) == 1 and lines[0].startswith(f"eviction     {eviction}: ") and "(as set)" in lines[0]
        assert not any(line.startswith("eviction") for line in alone.plan_lines())
        for _ in range(3):
            wanted = alone.generate(talks, params, use_tqdm=False)
            said = llm.generate(talks, params, use_tqdm=False)
            assert [one.outputs[0].token_ids for one in said] == [one.outputs[0].token_ids for one in wanted]
            talks = [talk + list(one.outputs[0].token_ids) for talk, one in zip(talks, said)]
        kv = llm._built.engine.scheduler.kv
        assert kv.stats.evicted_blocks > 0 and kv.stats.hit > 0
