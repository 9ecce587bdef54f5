"""In batch-invariant mode a GPU gives a request the same bits, whatever runs beside it and however it is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_mixes import mix

from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

ALONE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "cuda_graphs": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "one row, recorded": {"max_num_seqs": 1},
    "256 rows": {"max_num_seqs": 256},
    "64 rows, chunks of 100, nothing recorded": {
        "max_num_seqs": 64, "max_num_batched_tokens": 100, "cuda_graphs": False,
    },
    "33 rows, chunks of 1000, not cached": {
        "max_num_seqs": 33, "max_num_batched_tokens": 1000, "enable_prefix_caching": False,
    },
    # Room for some 4000 tokens: requests are preempted.
    "memory too small": {"max_num_seqs": 64, "kv_cache_memory": 4 << 20, "max_model_len": 1024},
}  # fmt: skip


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """The mix of the other tests, and 256 short requests of which every other one wants log-probabilities."""
    prompts, params = mix()
    for number in range(256):
        prompts.append([(number * 31 + i * 7) % 4000 for i in range(1 + number % 90)])
        params.append(
            SamplingParams(
                temperature=[0.0, 1.0][number // 2 % 2], seed=number, max_tokens=24, ignore_eos=True, detokenize=False,
                logprobs=[None, 3][number % 2], prompt_logprobs=[None, 1][number % 7 == 0],
            )
        )  # fmt: skip
    return prompts, params


def answers(model: str, dtype: str, **options: Any) -> tuple[list[Any], int]:
    """Tokens and the bits of all log-probabilities, and how often a request was preempted."""
    with LLM(model, dtype=dtype, device="cuda", skip_tokenizer_init=True, batch_invariant=True, **options) as llm:
        outputs = llm.generate(*requests(), use_tqdm=False)
        again = llm.generate(*requests(), use_tqdm=False)
        llm._processor.engine.scheduler.check_integrity()
        found = [(bits(output.prompt_logprobs), [(one.token_ids, bits(one.logprobs)) for one in output.outputs])
                 for output in outputs]  # fmt: skip
        warm = [[one.token_ids for one in output.outputs] for output in again]
        assert warm == [[tokens for tokens, _ in ones] for _, ones in found]
        return found, llm._processor.engine.scheduler.stats.preemptions


def bits(tables: Any) -> Any:
    if tables is None:
        return None
    return [None if table is None else {token: one.logprob.hex() for token, one in table.items()} for table in tables]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_the_batch(checkpoint: str, dtype: str) -> None:
    expected, _ = answers(checkpoint, dtype, **ALONE)
    for name, options in VARIANTS.items():
        found, preemptions = answers(checkpoint, dtype, **options)
        differ = [index for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)) if mine != theirs]
        assert not differ, f"{name}: {len(differ)} of {len(found)} requests, the first is {differ[0]}"
        assert preemptions or name != "memory too small"


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 100, 129, 256, 300])
def test_products_give_a_row_the_same_bits_everywhere(rows: int) -> None:
    from tokenmill.ops.triton.gemm.invariant import invariant_gemm

    torch.manual_seed(rows)
    for columns, inner in ((512, 4096), (9216, 1024), (777, 1032)):
        x = torch.randn(8192, inner, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
        whole = invariant_gemm(x, weight)
        for _ in range(4):
            pick = torch.randint(0, 8192, (rows,), device="cuda")
            assert torch.equal(invariant_gemm(x[pick], weight), whole[pick])


@pytest.mark.parametrize("tokens", [1, 7, 64, 500])
def test_mixtures_give_a_token_the_same_bits_everywhere(tokens: int) -> None:
    from tokenmill.ops.triton.moe.invariant import moe, route

    torch.manual_seed(tokens)
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    router = torch.randn(64, 512, device="cuda")
    gate_up = torch.randn(64, 512, 512, device="cuda", dtype=torch.bfloat16) / 20
    down = torch.randn(64, 512, 256, device="cuda", dtype=torch.bfloat16) / 16
    whole = moe(x, *route(x, router, 8, True, 1.0), gate_up, down, "silu")
    pick = torch.randint(0, 4096, (tokens,), device="cuda")
    some = x[pick]
    assert torch.equal(moe(some, *route(some, router, 8, True, 1.0), gate_up, down, "silu"), whole[pick])
