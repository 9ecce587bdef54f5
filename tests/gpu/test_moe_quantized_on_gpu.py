"""On a GPU, experts in small numbers give what plain torch makes of them; recorded steps give plain steps' tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.quant.forms import parse_form
from tokenmill.quant.schemes.expert_codes import ExpertCodes
from tokenmill.quant.schemes.experts import Experts, allocate_experts, moe_each

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
FORMS = ["int8", "int4-g32", "int4-g128-zeros", "w8a8", "fp8"]
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def made(form: str, rows: int, columns: int) -> Experts:
    one = allocate_experts(ExpertCodes(parse_form(form)), 16, rows, columns, torch.bfloat16, torch.device("cuda"))
    for storage in one.storages:
        one.scheme.write(storage, 0, torch.randn(rows, columns, device="cuda") * columns**-0.5)
    return one


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_those_of_the_codes(form: str, tokens: int, dtype: torch.dtype) -> None:
    from tokenmill.ops.triton.moe import codes

    torch.manual_seed(tokens)
    gate_up, down = made(form, 512, 384), made(form, 384, 256)
    x = torch.randn(tokens, 384, device="cuda", dtype=dtype)
    shares, chosen = torch.rand(tokens, 16, device="cuda").topk(4, dim=-1)
    op = codes.moe_w8a8 if form == "w8a8" else codes.moe_codes
    found = op(x, shares, chosen, gate_up.operand, down.operand, "silu").float()
    expected = moe_each(x.float(), shares, chosen, gate_up, down, "silu")
    assert float((found - expected).norm() / expected.norm()) < (1e-2 if dtype != torch.float32 else 5e-3)


@pytest.mark.parametrize("form", [*FORMS, "int4,layers.1.experts_down=int8"])
def test_recorded_steps_give_the_tokens_of_plain_ones(form: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, **MOE)
    prompts = [[(53 * place + 17 * row) % 4000 + 5 for place in range(4 + 13 * row)] for row in range(6)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    found = []
    for graphs in (True, False):
        with LLM(
            model, device="cuda", load_format="dummy", skip_tokenizer_init=True, quantization=form, cuda_graphs=graphs,
            max_model_len=256,
        ) as llm:  # fmt: skip
            runner = llm._processor.engine.runner
            experts = runner.decoder.weights.layer(0).mlp.gate_up
            assert isinstance(experts, Experts) and runner.decoder.recordable
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
    same = sum(a == b for ones in zip(*found, strict=True) for a, b in zip(*ones, strict=True))
    assert same >= 0.9 * 6 * 16  # recorded steps are padded, which may cut products otherwise
