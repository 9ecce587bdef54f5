"""The Triton norm, rope and activation kernels compute what the reference computes."""

from functools import partial

import pytest
import torch
from cases import RopeCase, rope_case, tolerance

from tokenmill.ops import reference

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 64), (2, 3, 2, 80), (1, 1000), (0, 64)])
def test_rms_norm_equals_reference(shape, dtype, triton_device):
    from tokenmill.ops.triton import norm

    x = randn(*shape, dtype=dtype, device=triton_device)
    weight = randn(shape[-1], dtype=torch.float32, device=triton_device, seed=1)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), expected, **tolerance(dtype))


def test_rms_norm_reads_heads_inside_a_fused_tensor(triton_device):
    from tokenmill.ops.triton import norm

    fused = randn(5, 8 * 32, dtype=torch.float32, device=triton_device)
    weight = randn(32, dtype=torch.float32, device=triton_device, seed=1)
    for heads in (fused[:, 64:192].view(5, 4, 32), fused.view(5, 4, 64)[..., 32:]):
        torch.testing.assert_close(norm.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


def test_rms_norm_of_a_row_does_not_depend_on_the_batch(triton_device):
    from tokenmill.ops.triton import norm

    x = randn(33, 128, dtype=torch.float32, device=triton_device)
    weight = randn(128, dtype=torch.float32, device=triton_device, seed=1)
    whole = norm.rms_norm(x, weight, 1e-6)
    assert torch.equal(norm.rms_norm(x[17:18], weight, 1e-6), whole[17:18])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 200])
def test_add_rms_norm_equals_reference(dim, dtype, triton_device):
    from tokenmill.ops.triton import norm

    x = randn(7, dim, dtype=dtype, device=triton_device)
    residual = randn(7, dim, dtype=dtype, device=triton_device, seed=1) * 10
    weight = randn(dim, dtype=dtype, device=triton_device, seed=2)
    _, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    got_normed, got_total = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    # The interpreter cuts bfloat16 off where hardware rounds.
    one_unit = 2**-7 if dtype == torch.bfloat16 and triton_device == "cpu" else 0.0
    torch.testing.assert_close(got_total, total, rtol=one_unit, atol=0.0)
    torch.testing.assert_close(got_normed, reference.rms_norm(got_total, weight, 1e-5), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_act_mul_equals_reference(kind, dtype, triton_device):
    from tokenmill.ops.triton import activation

    x = randn(3, 2 * 1100, dtype=dtype, device=triton_device) * 5
    x[0, :4] = torch.tensor([90.0, -90.0, 0.0, -0.0])
    torch.testing.assert_close(activation.act_mul(x, kind), reference.act_mul(x, kind), **tolerance(dtype))


def test_act_mul_refuses_an_unknown_kind(triton_device):
    from tokenmill.ops.triton import activation

    with pytest.raises(ValueError, match="relu"):
        activation.act_mul(torch.zeros(1, 4, device=triton_device), "relu")


ROPE_SHAPES = [
    {},
    {"heads": 3, "kv_heads": 1, "dim": 20, "rotated": 8},
    {"heads": 6, "kv_heads": 6, "dim": 96, "block_size": 16},
    {"heads": 5, "kv_heads": 1, "dim": 72, "v_dim": 0, "rotated": 8},
    {"heads": 2, "kv_heads": 2, "dim": 24, "v_dim": 16, "rotated": 12},
    {"heads": 2, "kv_heads": 2, "rotated": 0},
    {"heads": 40, "kv_heads": 33, "dim": 64},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
def test_rope_kv_write_equals_reference(shape, dtype, triton_device):
    from tokenmill.ops.triton import rope

    case = rope_case(5, skipped=2, dtype=dtype, device=triton_device, **shape)
    check_rope(case, rope.rope_kv_write, tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
def test_rope_kv_write_norms_heads_as_the_reference_does(shape, dtype, triton_device):
    from tokenmill.ops.triton import rope

    case = rope_case(5, skipped=2, dtype=dtype, device=triton_device, **shape)
    case.fused *= 3
    weights = randn(2, case.dim, dtype=torch.float32, device=triton_device, seed=1)
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-3}
    check_rope(case, partial(rope.rope_kv_write, **norms), tolerance(dtype), partial(reference.rope_kv_write, **norms))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
def test_rope_alone_turns_queries_as_the_write_does(shape, dtype, triton_device):
    from tokenmill.ops.triton import rope

    case = rope_case(5, skipped=2, dtype=dtype, device=triton_device, **shape)
    expected, own = case.copy().call(reference.rope_kv_write)[0], case.copy()
    q = own.fused[:, : case.heads * case.dim].view(-1, case.heads, case.dim)
    rope.rope(q, case.cos_sin, case.positions)
    torch.testing.assert_close(q, expected, **tolerance(dtype))
    rest = case.heads * case.dim
    assert torch.equal(own.fused[:, rest:], case.fused[:, rest:])


def test_reference_rope_kv_write_norms_first_and_rounds_between():
    case = rope_case(6, dtype=torch.bfloat16)
    weights = randn(2, case.dim, dtype=torch.bfloat16, device="cpu", seed=1)
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-5}
    fused, separate = case.copy(), case.copy()
    got = fused.call(partial(reference.rope_kv_write, **norms))
    for first, heads, weight in ((0, case.heads, weights[0]), (case.heads * case.dim, case.kv_heads, weights[1])):
        part = separate.fused[:, first : first + heads * case.dim].view(-1, heads, case.dim)
        part.copy_(reference.rms_norm(part, weight, 1e-5))
    for have, want in zip(got, separate.call(reference.rope_kv_write)):
        assert torch.equal(have, want)


def check_rope(case: RopeCase, fn, limits: dict[str, float], definition=reference.rope_kv_write) -> None:
    expected, got = case.copy(), case.copy()
    for want, have in zip(expected.call(definition), got.call(fn)):
        assert (want is None) == (have is None)
        if want is not None:
            torch.testing.assert_close(have, want, **limits)
    rest = (case.heads * case.dim) if case.fused.numel() else 0
    assert torch.equal(got.fused[:, rest:], case.fused[:, rest:]), "k and v themselves must stay as they were"


def test_rope_kv_write_casts_to_the_dtype_of_the_cache(triton_device):
    from tokenmill.ops.triton import rope

    case = rope_case(4, dtype=torch.float32, device=triton_device)
    case.k_cache, case.v_cache = case.k_cache.half(), case.v_cache.half()
    check_rope(case, rope.rope_kv_write, tolerance(torch.float16))
