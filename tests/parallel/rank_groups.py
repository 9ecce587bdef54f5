"""Engines of several ranks for tests, and what is left of them."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.engine.ranks.group import RankGroup

# float64: what is computed in other steps than before differs by far less than any gap between logits
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float64",
    "device": "cpu",
    "max_num_seqs": 16,
    "max_model_len": 256,
    "kv_cache_memory": 1 << 22,
    "speculation": "off",
}


STREAMS = 20  # requests of `answers`
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 333}  # what three ranks can divide


def opened(folder: str, ranks: int = 1, **options: Any) -> LLM:
    parallel = {"parallel": f"tp{ranks}"} if ranks > 1 else {}
    return LLM(folder, **SETTINGS | parallel | options)


def group_of(llm: LLM) -> RankGroup:
    group = llm._built.engine.runner
    assert isinstance(group, RankGroup)
    return group


def said(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens, and log-probabilities as far as sums in another order leave them alone."""
    return [
        (
            [(one.token_ids, one.finish_reason, _rounded(one.logprobs)) for one in output.outputs],
            _rounded(output.prompt_logprobs),
        )
        for output in outputs
    ]


def answers(llm: LLM) -> list[Any]:
    """What `STREAMS` mixed requests are told, with nothing found in the cache."""
    llm.reset_prefix_cache()
    return said(llm.generate(prompts(5, STREAMS), mixed(5, STREAMS), use_tqdm=False))


def no_logprobs(all_said: list[Any]) -> list[object]:
    return [[(tokens, why) for tokens, why, _ in one] for one, _ in all_said]


def _rounded(logprobs: list[Any] | None) -> list[Any]:
    return [
        one and {token: (round(found.logprob, 4), found.rank) for token, found in one.items()} for one in logprobs or []
    ]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Some begin as others do."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, 100) for _ in range(40)] for _ in range(3)]
    return [
        rng.choice(beginnings)[: rng.randrange(40)] + [rng.randrange(3, 100) for _ in range(rng.randrange(1, 20))]
        for _ in range(count)
    ]


def mixed(seed: int, count: int, max_tokens: int = 24) -> list[SamplingParams]:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 7},
        {"n": 3, "seed": 8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 9, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 5},
        {"temperature": 0, "prompt_logprobs": 2, "logit_bias": {5: 3.0}},
        {"temperature": 0, "beam_width": 3, "n": 2},
    ]
    return [
        SamplingParams(**kinds[(seed + k) % len(kinds)], max_tokens=rng.randrange(5, max_tokens)) for k in range(count)
    ]


def gone(pids: list[int], within: float = 10.0) -> bool:
    """Whether none of these processes is there any more, not even for its parent to bury."""
    until = time.monotonic() + within
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def children(pid: int | None = None) -> list[int]:
    """Of this process, or of another: as many as there are below it."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(status.parent.name))
    found = parents.get(os.getpid() if pid is None else pid, [])
    return found + [below for one in found for below in children(one)]
