"""Opens small engines for the API tests, and says when one has let go of everything."""

from __future__ import annotations

from typing import Any

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.engine.core import Engine

# float64 makes rounding differences between batch shapes far smaller than any gap between logits: equal means equal.
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float64",
    "device": "cpu",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
PROMPT = [5, 9, 14, 21, 33, 47]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def open_tiny(model: str, **options: Any) -> LLM:
    return LLM(model, **SETTINGS | options)


def open_tiny_async(model: str, **options: Any) -> AsyncLLM:
    return AsyncLLM(model, **SETTINGS | options)


def ids(llm: LLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    """The tokens of one answer."""
    return llm.generate([prompt], params, use_tqdm=False, **options)[0].outputs[0].token_ids


def assert_idle(engine: Engine) -> None:
    """No request is alive, no row or block is held, and the books are in order."""
    for _ in range(3):  # let a launched step come back
        engine.step()
    scheduler = engine.scheduler
    assert not scheduler.requests and not scheduler.running and not len(scheduler.waiting)
    assert not engine.has_work
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
