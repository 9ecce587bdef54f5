"""w8a8: what is stored, that products are exact sums of it, and that every way to a product gives the same bits."""

from __future__ import annotations

import pytest
import torch

from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.ops.matmul_torch import FLOAT8, quantize_rows
from tokenmill.ops.registry import Need, select
from tokenmill.ops.types import QuantizedRows
from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.handover import act_mul_for, add_norm_for
from tokenmill.quant.schemes.row_scaled import W8A8, Fp8, RowScaled
from tokenmill.quant.schemes.scheme import Linear, Schemes

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
SCHEMES = [W8A8(), Fp8()]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(weight: torch.Tensor, scheme: RowScaled | None = None, dtype: torch.dtype = torch.float32) -> Linear:
    scheme = scheme or W8A8()
    storage = scheme.allocate(*weight.shape, dtype, CPU)
    scheme.write(storage, 0, weight)
    return Linear(scheme, storage)  # type: ignore[arg-type]


def groups_of(scheme: RowScaled, rows: int, columns: int, seed: int, input_scale: float | None = None) -> Groups:
    """A matrix as a checkpoint may hold it, with all codes there are."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, columns), generator=generator)
    fixed = None if input_scale is None else torch.tensor(input_scale)
    return Groups(codes.to(scheme.code_dtype), randn(rows, 1, seed=seed).abs() / 100, 8, input_scale=fixed)


def exact(rows: QuantizedRows, storage, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = rows.values.double() @ storage["weight"].double().T
    out = out * storage["scale"].double() * rows.scale.double()[..., None]
    return out if bias is None else out + bias.double()


def test_every_weight_is_within_half_a_step_of_what_was_written():
    weight = randn(40, 96) * torch.logspace(-6, 3, 40)[:, None]
    weight[7] = 0
    storage = stored(weight).storage
    assert storage["weight"].dtype == torch.int8
    back = storage["weight"].float() * storage["scale"][:, None]
    assert ((back - weight).abs() <= storage["scale"][:, None] * 0.50001).all()
    full = storage["weight"].int().abs().amax(1)
    assert full[7] == 0 and (full[torch.arange(40) != 7] == 127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [64, 3000])  # one piece, and several that are not all whole
def test_products_are_exact_sums_times_both_scales(dtype, columns):
    layer = stored(randn(24, columns), dtype=dtype)
    x, bias = randn(2, 5, columns, seed=1).to(dtype), randn(24, seed=2).to(dtype)
    expected = exact(quantize_rows(x, torch.int8), layer.storage, bias)
    got = Linear(layer.scheme, layer.storage, bias)(x)
    assert got.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=2 * unit, atol=4 * unit)


def test_the_largest_sums_there_can_be_are_exact():
    """All codes at their ends: a float32 sum of a whole row would not hold them."""
    storage = {"weight": torch.full((2, 5000), -128, dtype=torch.int8), "scale": torch.ones(2)}
    storage["weight"][1, ::2] = 127
    values = torch.full((1, 5000), -128, dtype=torch.int8)
    values[0, 17] = 127
    rows = QuantizedRows(values, torch.ones(1), torch.float64)
    assert torch.equal(Linear(W8A8(), storage)(rows), exact(rows, storage))


def test_a_row_has_the_same_bits_alone_and_among_others():
    layer, x = stored(randn(24, 300)), randn(33, 300, seed=1)
    together = layer(x)
    for count in (1, 2, 17):
        assert torch.equal(layer(x[:count]), together[:count])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_codes_of_a_checkpoint_are_stored_as_they_are(scheme):
    """Also those that rounding would not give: rows that do not use the whole range."""
    parts = [groups_of(scheme, 16, 64, seed=1), groups_of(scheme, 8, 64, seed=2)]
    storage = scheme.allocate(24, 64, torch.float32, CPU)
    scheme.write_groups(storage, 16, parts[1])
    scheme.write_groups(storage, 0, parts[0])
    codes = torch.cat([part.codes.float() for part in parts])
    assert torch.equal(storage["weight"].float(), codes)
    assert torch.equal(storage["scale"], torch.cat([part.scale[:, 0] for part in parts]))
    assert "input_scale" not in storage


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_scale_of_the_whole_matrix_counts_for_every_row(scheme):
    codes = groups_of(scheme, 16, 64, seed=1).codes
    storage = scheme.allocate(16, 64, torch.float32, CPU)
    scheme.write_groups(storage, 0, Groups(codes, torch.tensor([[0.25]]).expand(16, 1), 8))
    assert torch.equal(storage["scale"], torch.full((16,), 0.25))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_forms_that_cannot_be_stored_are_rounded_again(scheme):
    groups = Groups(torch.randint(-8, 8, (16, 64), dtype=torch.int8), randn(16, 4).abs(), 4)
    storage = scheme.allocate(16, 64, torch.float32, CPU)
    scheme.write_groups(storage, 0, groups)
    expected = stored(groups.widen(torch.float32), scheme).storage
    assert torch.equal(storage["weight"].float(), expected["weight"].float())
    assert torch.equal(storage["scale"], expected["scale"])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_given_input_scale_is_used_for_every_row(scheme):
    storage = scheme.allocate(16, 64, torch.float32, CPU)
    scheme.write_groups(storage, 0, groups_of(scheme, 16, 64, seed=1, input_scale=0.03))
    x = randn(5, 64, seed=3) * torch.tensor([1.0, 0.1, 1.0, 1.0, 400.0])[:, None]  # the last row is clipped
    rows = quantize_rows(x, scheme.code_dtype, torch.tensor(0.03))
    assert (rows.scale == 0.03).all() and rows.values[4].float().abs().max() >= 127
    for given in (x, rows):
        torch.testing.assert_close(Linear(scheme, storage)(given).double(), exact(rows, storage), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(Linear(scheme, storage)(x[:1]).double(), exact(rows, storage)[:1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_of_the_input_scales_of_a_fused_matrix_the_largest_counts(scheme, order):
    storage = scheme.allocate(24, 64, torch.float32, CPU)
    for part in order:
        groups = groups_of(scheme, 8, 64, seed=part, input_scale=(0.02, 0.05, 0.01)[part])
        scheme.write_groups(storage, 8 * part, groups)
    assert storage["input_scale"].shape == () and storage["input_scale"] == torch.tensor(0.05)


@pytest.mark.parametrize("fixed", [None, 0.02], ids=["dynamic", "static"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_rows_handed_over_are_those_that_the_layer_would_make(scheme, fixed):
    storage = scheme.allocate(8, 64, torch.float32, CPU)
    scheme.write_groups(storage, 0, groups_of(scheme, 8, 64, seed=1, input_scale=fixed))
    layer, ops = Linear(scheme, storage), select(Need("cpu", torch.float32))
    x, gain = randn(4, 64, seed=2), randn(64, seed=3)
    plain, total = ops.add_rms_norm(x.clone(), x.clone(), gain, 1e-6)
    normed, got_total = add_norm_for(layer, ops, x.clone(), x.clone(), gain, 1e-6)
    wide = randn(4, 128, seed=4)
    active = act_mul_for(layer, ops, wide, "silu")
    assert torch.equal(got_total, total)
    asks = layer.inputs(4, torch.float32) is not None
    assert asks == (scheme.name == "w8a8" or fixed is not None)
    for rows, apart in ((normed, plain), (active, ops.act_mul(wide, "silu"))):
        assert isinstance(rows, QuantizedRows) == asks
        if isinstance(rows, QuantizedRows):
            assert rows.values.dtype == scheme.code_dtype
        assert torch.equal(layer(rows), layer(apart))


@pytest.mark.parametrize("fixed", [None, torch.tensor(0.1)], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8], ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_the_product(wrong, dtype, fixed):
    x = randn(3, 64)
    x[1, 9] = wrong
    rows = quantize_rows(x, dtype, fixed)
    assert rows.scale.isfinite().tolist() == [True, False, True]
    if dtype == torch.int8:
        out = stored(randn(8, 64, seed=1))(rows)
        assert out.isfinite().all(1).tolist() == [True, False, True] and not out[1].isfinite().any()


def test_logits_of_a_random_model_stay_close():
    from fp8_models import logits_of

    spec, ids = spec_from_config(LLAMA), list(range(5, 60))
    plain = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3), ids)
    moved = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3, Schemes.inside(W8A8())), ids)
    error = (moved - plain).norm() / plain.norm()
    assert 0.001 < error < 0.05, f"logits moved by {error:.1%}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("fixed", [None, 0.03], ids=["dynamic", "static"])
@pytest.mark.parametrize("rows", [1, 5, 64, 65, 100, 256, 300, 1500])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_products_on_the_gpu_are_those_of_the_codes(scheme, rows, fixed):
    cuda, dtype = torch.device("cuda", 0), torch.bfloat16
    storage = scheme.allocate(520, 1040, dtype, cuda)
    scheme.write_groups(storage, 0, groups_of(scheme, 520, 1040, seed=1, input_scale=fixed))
    x, bias = randn(rows, 1040, seed=1).to(cuda, dtype), randn(520, seed=2).to(cuda, dtype)
    from tokenmill.ops.triton.gemm.matmul import quantize_rows as on_the_gpu

    codes = on_the_gpu(x, scheme.code_dtype, storage.get("input_scale"))
    expected = exact(codes, storage, bias)
    for given in (codes, codes, x):
        if scheme.name == "fp8" and rows == 1 and given is x and fixed is None:
            continue  # multiplied as it is
        got = Linear(scheme, storage, bias)(given).double()
        assert (got - expected).norm() / expected.norm() < 0.003
    assert not storage["counters"].any()
