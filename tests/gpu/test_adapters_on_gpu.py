"""Adapters on a GPU: the kernels against plain torch at sizes of real models, and answers beside merged weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "adapters"))
from peft_folders import merged, write_adapter, write_base

from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.ops.reference_low_rank import add_low_rank as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


@pytest.mark.parametrize("tokens", [1, 64, 700])
@pytest.mark.parametrize("rank", [8, 16, 64, 256])
def test_kernels_agree_with_torch_on_large_layers(tokens: int, rank: int) -> None:
    from tokenmill.ops.triton.low_rank import add_low_rank

    ends, columns, slots = (4096, 5120, 6144), 4096, 32
    make = torch.Generator("cuda").manual_seed(rank)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16)

    down, up = some(slots, 3 * rank, columns) / columns**0.5, some(slots, rank, ends[-1]) / rank**0.5
    adapter = torch.arange(tokens, device="cuda") % (slots + 1) - 1
    ranks = torch.full((slots,), rank, device="cuda")
    out, x = some(tokens, ends[-1]), some(tokens, columns)
    wanted = reference(out.float(), x.float(), adapter, down.float(), up.float(), ranks, ends)
    found = add_low_rank(out.clone(), x, adapter, down, up, ranks, ends)
    assert (found.float() - wanted).abs().max() < 0.1
    assert torch.equal(found[adapter < 0], out[adapter < 0])


def test_answers_are_those_of_merged_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cuda", "max_model_len": 128}
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 10, 11] * 12]
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", rank=4, alpha=8)
    expected = []
    for folder in (base, merged(base, adapter, tmp_path / "merged", 2.0)):
        with LLM(str(folder), **options) as llm:
            expected += [one.outputs[0].token_ids for one in llm.generate(prompts, params, False)]
    with LLM(str(base), enable_lora=True, **options) as llm:
        asked = [None, None, *[LoRARequest("a", 1, str(adapter))] * 2]
        for _ in range(3):
            outputs = llm.generate(prompts * 2, params, False, lora_request=asked)
            assert [one.outputs[0].token_ids for one in outputs] == expected
