"""Norms and activations hand float8 rows over to the layers that want them, and answers do not notice."""

from __future__ import annotations

import pytest
import torch
from fp8_models import ON_BOTH_SIDES, logits_of

from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.ops.matmul import NO_LIMIT, Matmul, MatmulKernel
from tokenmill.ops.matmul_torch import multiply_float8, quantize_rows
from tokenmill.ops.registry import Need, select
from tokenmill.ops.types import QuantizedRows
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.handover import act_mul_for, add_norm_for
from tokenmill.quant.schemes.row_scaled import Fp8
from tokenmill.quant.schemes.scheme import Linear, Schemes

SIZES = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip
# Handed over in three layers: to qkv (not in the first layer, where nothing is added yet), gate_up and down. Where
# norms stand behind the blocks only down has anything to gain. A mixture's input is read by several, its shared
# expert's activation by one.
CASES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, 2 + 3 + 3),
    "norms on both sides": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 16, "sliding_window": 9}, 2 + 3 + 3),
    "norms behind": ("Olmo2ForCausalLM", {}, 3),
    "experts": ("Qwen3MoeForCausalLM", EXPERTS | {"norm_topk_prob": True}, 2),
    "latent attention, shared experts": ("DeepseekV2ForCausalLM", DEEPSEEK, 2 + 1 + 3),
}


class OnBothSides(Fp8):
    """What a GPU does with several rows, here: float8 on both sides. Notes in which form inputs come."""

    def __init__(self, asks: bool) -> None:
        self.asks, self.handed_over = asks, 0

    def matmul(self, storage, dtype):
        """asks: says so, and is handed such rows; otherwise they are rounded inside."""
        need = super().matmul(storage, dtype).need
        alone = MatmulKernel("one row", ("fp8",), multiply_float8)
        inside = MatmulKernel("rounds", ("fp8",), rounds_inside)
        return Noting(self, need, [(1, alone), (NO_LIMIT, ON_BOTH_SIDES if self.asks else inside)])


def rounds_inside(need, x, storage, bias):
    return multiply_float8(need, quantize_rows(x), storage, bias)


class Noting(Matmul):
    def __init__(self, scheme: OnBothSides, *given) -> None:
        super().__init__(*given)
        self.scheme = scheme

    def __call__(self, x, storage, bias):
        self.scheme.handed_over += isinstance(x, QuantizedRows)
        return super().__call__(x, storage, bias)


@pytest.mark.parametrize("case", CASES)
def test_rows_handed_over_give_the_same_logits(case):
    architecture, changes, expected = CASES[case]
    spec = spec_from_config({"architectures": [architecture], **SIZES, **changes})
    fused, apart = OnBothSides(asks=True), OnBothSides(asks=False)
    weights = [dummy_weights(spec, torch.float32, "cpu", 1, Schemes.inside(scheme)) for scheme in (fused, apart)]
    logits = [logits_of(spec, one, [3, 1, 4, 15]) for one in weights]
    assert logits[0].isfinite().all() and torch.equal(*logits)
    assert (fused.handed_over, apart.handed_over) == (expected, 0)


def test_a_single_row_is_not_quantized():
    architecture, changes, _ = CASES["llama"]
    spec, scheme = spec_from_config({"architectures": [architecture], **SIZES, **changes}), OnBothSides(asks=True)
    alone = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 1, Schemes.inside(scheme)), [3])
    assert scheme.handed_over == 0
    assert torch.equal(alone, logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 1, Schemes.inside(Fp8())), [3]))


def test_layers_that_do_not_ask_get_plain_rows():
    ops = select(Need("cpu", torch.float32))
    dense = Linear(Dense(), {"weight": torch.zeros(8, 16)})
    x = torch.randn(4, 16)
    for reader in (dense, None):
        rows, total = add_norm_for(reader, ops, x.clone(), x.clone(), torch.ones(16), 1e-6)
        assert isinstance(rows, torch.Tensor) and torch.equal(total, x + x)
    assert isinstance(act_mul_for(dense, ops, x, "silu"), torch.Tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [2, 64, 300])
def test_on_the_gpu_fused_and_separate_kernels_give_the_same_products(rows):
    cuda, dtype = torch.device("cuda", 0), torch.bfloat16
    ops = select(Need("cuda", dtype))
    scheme = Fp8()
    storage = scheme.allocate(512, 1024, dtype, cuda)
    generator = torch.Generator().manual_seed(rows)
    scheme.write(storage, 0, torch.randn(512, 1024, generator=generator).to(dtype))
    layer = Linear(scheme, storage)
    x, residual, gate_up = (torch.randn(rows, size, generator=generator).to(cuda, dtype) for size in (1024, 1024, 2048))
    gain = torch.rand(1024, generator=generator).to(cuda, dtype)
    plain, plain_total = ops.add_rms_norm(x.clone(), residual.clone(), gain, 1e-6)
    normed, total = add_norm_for(layer, ops, x.clone(), residual.clone(), gain, 1e-6)
    active = act_mul_for(layer, ops, gate_up, "silu")
    assert isinstance(normed, QuantizedRows) and isinstance(active, QuantizedRows)
    assert torch.equal(total, plain_total)
    for got, apart in ((layer(normed), layer(plain)), (layer(active), layer(ops.act_mul(gate_up, "silu")))):
        # Sums in another order may move a number to the float8 beside it.
        assert (got.float() - apart.float()).norm() < 0.01 * apart.float().norm()
