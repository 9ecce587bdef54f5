"""Grouped products of experts in small numbers compute what plain torch computes from the same codes."""

import pytest
import torch
from cases import tolerance

from tokenmill.ops.matmul_torch import quantize_rows
from tokenmill.quant.forms import parse_form
from tokenmill.quant.schemes.expert_codes import ExpertCodes, paired, unpaired
from tokenmill.quant.schemes.experts import allocate_experts, moe_each

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
# The interpreter's dot takes bfloat16 for integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
FORMS = ["int8", "int4-g32", "int4-g64-zeros", "w8a8"] + (["fp8"] if torch.cuda.is_available() else [])


def mixture(tokens, k, form, experts=5, hidden=64, inner=128, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(tokens)
    made = []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        one = allocate_experts(ExpertCodes(parse_form(form)), experts, rows, columns, dtype, torch.device(device))
        for storage in one.storages:
            one.scheme.write(storage, 0, (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(device))
        made.append(one)
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    shares, chosen = torch.rand(tokens, experts, generator=generator).topk(k, dim=-1)
    return x, shares.to(device), chosen.to(device), *made


def op_of(form):
    from tokenmill.ops.triton.moe import codes

    return codes.moe_w8a8 if form == "w8a8" else codes.moe_codes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens,k", [(1, 1), (5, 2), (45, 3)])
def test_codes_give_what_the_reference_gives(tokens, k, dtype, form, triton_device):
    x, shares, chosen, gate_up, down = mixture(tokens, k, form, dtype=dtype, device=triton_device)
    found = op_of(form)(x, shares, chosen, gate_up.operand, down.operand, "silu")
    expected = moe_each(x.double() if form != "w8a8" else x.float(), shares, chosen, gate_up, down, "silu")
    if form == "w8a8":  # a code of the activations may be rounded the other way
        assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 5e-3
    else:
        torch.testing.assert_close(found, expected.to(dtype), **tolerance(dtype))


@pytest.mark.parametrize("hidden,inner,form", [(40, 48, "int8"), (96, 160, "int4-g32"), (200, 24, "w8a8")])
def test_sizes_need_not_be_multiples_of_blocks(hidden, inner, form, triton_device):
    x, shares, chosen, gate_up, down = mixture(7, 2, form, hidden=hidden, inner=inner, device=triton_device)
    found = op_of(form)(x, shares, chosen, gate_up.operand, down.operand, "gelu_tanh")
    expected = moe_each(x, shares, chosen, gate_up, down, "gelu_tanh")
    assert float((found - expected).norm() / expected.norm()) < (5e-3 if form == "w8a8" else 1e-5)


@pytest.mark.parametrize("form", ["int8", "int4-g32", "w8a8"])
def test_experts_that_nobody_chose_are_not_read_and_nan_stays_with_its_token(form, triton_device):
    x, shares, _, gate_up, down = mixture(6, 2, form, device=triton_device)
    chosen = torch.tensor([[1, 4], [4, 1]], device=triton_device).repeat(3, 1)
    right = op_of(form)(x, shares, chosen, gate_up.operand, down.operand, "silu")
    for one in (gate_up, down):
        one.stacked["scale"][[0, 2, 3]] = float("nan")
    x[1] = float("nan")
    found = op_of(form)(x, shares, chosen, gate_up.operand, down.operand, "silu")
    others = [0, 2, 3, 4, 5]
    assert torch.equal(found[others], right[others]) and found[1].isnan().all()


def test_w8a8_sums_are_exact(triton_device):
    """Every row alone gives the bits of the batch."""
    x, shares, chosen, gate_up, down = mixture(9, 2, "w8a8", device=triton_device)
    op = op_of("w8a8")
    whole = op(x, shares, chosen, gate_up.operand, down.operand, "silu")
    for row in range(9):
        some = slice(row, row + 1)
        assert torch.equal(
            op(x[some], shares[some], chosen[some], gate_up.operand, down.operand, "silu")[0], whole[row]
        )


def test_no_tokens_and_unknown_activations(triton_device):
    x, shares, chosen, gate_up, down = mixture(2, 1, "int8", device=triton_device)
    assert op_of("int8")(x[:0], shares[:0], chosen[:0], gate_up.operand, down.operand, "silu").shape == (0, 64)
    with pytest.raises(ValueError, match="relu"):
        op_of("int8")(x, shares, chosen, gate_up.operand, down.operand, "relu")


def test_codes_of_four_bits_lie_in_pairs():
    codes = torch.randint(-8, 8, (3, 96), dtype=torch.int8)
    assert torch.equal(unpaired(paired(codes)), codes)
    assert int(paired(codes)[0, 17]) == (int(codes[0, 33]) + 8) | (int(codes[0, 49]) + 8) << 4


def test_inputs_of_w8a8_are_rounded_by_row():
    x = torch.randn(4, 64)
    made = ExpertCodes(parse_form("w8a8"))
    storage = made.allocate(32, 64, torch.float32, torch.device("cpu"))
    made.write(storage, 0, torch.randn(32, 64))
    found = made.matmul(storage, torch.float32)(x, storage, None)
    expected = quantize_rows(x, torch.int8).widen() @ made.groups(storage).widen(torch.float32).T
    torch.testing.assert_close(found, expected)


def test_the_ops_may_be_recorded(triton_device):
    from tokenmill.ops.triton import IMPLEMENTATIONS

    assert {"moe_codes", "moe_w8a8"} <= {one.op for one in IMPLEMENTATIONS if one.capture_safe and one.optional}
