"""Products of few rows: our kernels compute what plain torch computes, alike in every run, and leave no trace."""

import itertools

import pytest
import torch

from tokenmill.ops import reference

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
# The interpreter's dot takes bfloat16 for integers.
DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
FLOAT8 = torch.float8_e4m3fn
SIZES = [(1, 70, 192), (1, 128, 100), (2, 70, 192), (16, 128, 512), (33, 65, 200), (80, 64, 64), (150, 64, 64)]


def randn(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def product(x, weight, bias=None, scale=None, x_scale=None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    out = out if scale is None else out * scale.double()
    out = out if x_scale is None else out * x_scale.double()[:, None]
    return out if bias is None else out + bias.double()


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    unit = torch.finfo(got.dtype).eps
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < unit, f"{error} is more than the rounding of the result"


def counters_of(columns: int, device: str) -> torch.Tensor:
    from tokenmill.ops.triton.gemm.small import counters_for

    return torch.zeros(counters_for(columns), dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense_products_equal_plain_torch(size, with_bias, dtype, triton_device):
    from tokenmill.ops.triton.gemm.small import small_gemm

    rows, columns, inner = size
    x = randn(rows, inner, device=triton_device).to(dtype)
    weight = randn(columns, inner, device=triton_device, seed=1).to(dtype)
    bias = randn(columns, device=triton_device, seed=2).to(dtype) if with_bias else None
    got = small_gemm(x, weight, bias, counters=counters_of(columns, triton_device))
    check(got, product(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_float8_weights_with_inputs_as_they_are(rows, dtype, triton_device):
    from tokenmill.ops.triton.gemm.small import small_gemm

    x = randn(rows, 256, device=triton_device).to(dtype)
    weight = (randn(96, 256, device=triton_device, seed=1) * 100).to(FLOAT8)
    scale = randn(96, device=triton_device, seed=2).abs() / 100
    bias = randn(96, device=triton_device, seed=3).to(dtype)
    check(small_gemm(x, weight, bias, scale=scale), product(x, weight, bias, scale))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's dot takes float8 for integers")
@pytest.mark.parametrize("rows", [1, 3, 40, 100])
def test_float8_weights_with_float8_inputs(rows, triton_device):
    from tokenmill.ops.triton.gemm.quantize import quantize_rows
    from tokenmill.ops.triton.gemm.small import small_gemm

    x, x_scale = quantize_rows(randn(rows, 256, device=triton_device).bfloat16())
    weight, scale = quantize_rows(randn(96, 256, device=triton_device, seed=1).bfloat16())
    got = small_gemm(x, weight, scale=scale, x_scale=x_scale, dtype=torch.bfloat16)
    check(got, product(x, weight, None, scale, x_scale))


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("inner", [512, 320])
def test_parts_meet_in_every_launch_and_give_the_same_bits(inner, splits, triton_device):
    """The counters are back at zero each time; what arrives last must not matter."""
    from tokenmill.ops.triton.gemm.small import GemmShape, small_gemm

    x = randn(5, inner, device=triton_device).half()
    weight = randn(200, inner, device=triton_device, seed=1).half()
    counters = counters_of(200, triton_device)
    shape = GemmShape(block_n=64, block_k=64, splits=splits, num_warps=4, num_stages=2)
    first = small_gemm(x, weight, counters=counters, shape=shape)
    check(first, product(x, weight))
    for _ in range(3):
        assert torch.equal(small_gemm(x, weight, counters=counters, shape=shape), first)
        assert not counters.any()


def test_rows_may_be_slices_of_something_wider(triton_device):
    from tokenmill.ops.triton.gemm.small import small_gemm

    wide = randn(4, 512, device=triton_device).half()
    weight = randn(64, 256, device=triton_device, seed=1).half()
    for rows in (1, 4):
        x = wide[:rows, 128:384]
        check(small_gemm(x, weight), product(x, weight))


def test_the_rule_uses_only_shapes_that_can_be_launched():
    from tokenmill.ops.triton.gemm.small import LEAST_TILE, GemmShape, choose_shape

    sizes = itertools.product((1, 2, 16, 17, 33, 64, 500), (8, 64, 1000, 151936), (8, 100, 1024, 14336))
    for (rows, columns, inner), itemsizes in itertools.product(sizes, ((2, 2), (2, 1), (1, 1))):
        shape = choose_shape(rows, columns, inner, *itemsizes, torch.device("cpu"), may_split=True)
        powers = [shape.block_n, shape.block_k]
        if isinstance(shape, GemmShape):
            assert shape.block_n >= LEAST_TILE and shape.block_k >= 32
            powers.append(shape.splits)
            stage = shape.block_k * (shape.block_n * itemsizes[1] + min(128, max(rows, 16)) * itemsizes[0])
            assert stage * shape.num_stages <= 227 << 10, "more shared memory than a multiprocessor has"
        assert all(size & (size - 1) == 0 for size in powers)


def check_quantized(values, scale, expected: torch.Tensor) -> None:
    from tokenmill.ops.matmul_torch import quantize_rows

    plain = quantize_rows(expected)
    torch.testing.assert_close(scale, plain.scale, rtol=1e-3, atol=0)
    # A quotient at the edge between two floats may fall either way; the interpreter also errs where a carry is due.
    want = plain.values.float()
    off = (values.float() - want).abs() > 2**-3 * want.abs() + 2**-9
    assert off.float().mean() < (0.05 if values.device.type == "cpu" else 1e-9)


@pytest.mark.parametrize("size", [(3, 64), (5, 100), (2, 1500)])
def test_quantized_rows_equal_the_plain_form(size, triton_device):
    from tokenmill.ops.triton.gemm.quantize import quantize_rows

    x = randn(*size, device=triton_device) * 30
    x[1] = 0
    values, scale = quantize_rows(x)
    assert not values[1].float().any() and scale[1] == 1
    check_quantized(values, scale, x)


@pytest.mark.parametrize("dim", [64, 200])
def test_a_norm_that_quantizes_equals_the_norm_quantized(dim, triton_device):
    from tokenmill.ops.triton.gemm.quantize import add_rms_norm_quantized

    x, residual = (randn(4, dim, device=triton_device, seed=seed).half() for seed in (0, 1))
    weight = randn(dim, device=triton_device, seed=2).half()
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    values, scale, got_total = add_rms_norm_quantized(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(got_total, total)
    check_quantized(values, scale, normed)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_an_activation_that_quantizes_equals_the_activation_quantized(kind, triton_device):
    from tokenmill.ops.triton.gemm.quantize import act_mul_quantized

    x = randn(3, 2 * 300, device=triton_device).half() * 4
    check_quantized(*act_mul_quantized(x, kind), reference.act_mul(x, kind))
