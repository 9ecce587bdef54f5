"""A single row may leave its norm and its activation to the products: the model says the same, and others do not."""

import pytest
import torch
import torch.nn.functional as F
from fp8_models import QuantizedInputs, logits_of
from small_models import CONFIG

from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.ops.matmul import MatmulKernel, dense_need, only
from tokenmill.ops.matmul_torch import multiply_dense
from tokenmill.ops.registry import Need, select
from tokenmill.ops.types import Unnormed
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.handover import add_norm_for, gate_up_for
from tokenmill.quant.schemes.scheme import Linear, Schemes

LLAMA = CONFIG | {"num_hidden_layers": 3}


class Fusing(Dense):
    """Does in torch what the kernel of one row does."""

    def __init__(self, gates: bool = True) -> None:
        super().__init__()
        self.gates = gates
        self.calls: list[tuple[bool, str]] = []  # normed, activation

    def matmul(self, storage, dtype):
        need = dense_need(storage["weight"], dtype)
        fusing = {"fused": self.fused, "gates": lambda need: self.gates}
        return only(MatmulKernel("fuses", ("dense",), multiply_dense, **fusing), need)

    def fused(self, need, x, storage, bias, act):
        self.calls.append((isinstance(x, Unnormed), act))
        if isinstance(x, Unnormed):
            x.total.copy_(x.residual + x.update)
            x = F.rms_norm(x.total, x.total.shape[-1:], x.weight, x.eps)
        out = multiply_dense(need, x, storage, bias)
        if not act:
            return out
        gate, up = out.chunk(2, -1)
        return (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_one_token_is_computed_alike(kind):
    spec = spec_from_config(LLAMA | {"hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[kind]})
    fusing = Fusing()
    plain = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3), [7])
    fused = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3, Schemes.inside(fusing)), [7])
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    # The first norm has nothing to add, and o and down are plain products.
    assert fusing.calls == [(True, kind)] + [(True, ""), (True, kind)] * 2


def test_a_product_that_cannot_gate_still_norms():
    spec, fusing = spec_from_config(LLAMA), Fusing(gates=False)
    plain = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3), [7])
    fused = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3, Schemes.inside(fusing)), [7])
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    assert fusing.calls == [(True, "")] * 5


def test_several_tokens_are_not_fused():
    spec, fusing = spec_from_config(LLAMA), Fusing()
    logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3, Schemes.inside(fusing)), [7, 8])
    assert fusing.calls == []


def linear(scheme, rows: int, columns: int) -> Linear:
    storage = scheme.allocate(rows, columns, torch.float32, torch.device("cpu"))
    scheme.write(storage, 0, torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)))
    return Linear(scheme, storage)


def ops(dtype: torch.dtype = torch.float32):
    return select(Need(device="cpu", dtype=dtype, head_dim=32, block_size=16))


def test_a_norm_of_another_precision_is_not_left_to_the_product():
    x = torch.randn(1, 32, dtype=torch.bfloat16)
    weight = torch.ones(32)
    rows, _ = add_norm_for(linear(Fusing(), 16, 32), ops(torch.bfloat16), x.clone(), x.clone(), weight, 1e-6)
    assert isinstance(rows, torch.Tensor)


def test_rows_for_a_reader_that_quantizes_are_activated_apart():
    fusing = Fusing()
    x = torch.randn(1, 32)
    rows = gate_up_for(linear(QuantizedInputs(), 16, 32), ops(), linear(fusing, 64, 32), x, "silu")
    assert not isinstance(rows, torch.Tensor) and fusing.calls == []
    rows = gate_up_for(linear(Dense(), 16, 32), ops(), linear(fusing, 64, 32), x, "silu")
    assert isinstance(rows, torch.Tensor) and rows.shape == (1, 32) and fusing.calls == [(False, "silu")]
