"""Products of few rows, and of gate and up with their activation inside, at sizes that no tile divides."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


@pytest.fixture(scope="module", autouse=True)
def hopper():
    from tokenmill.ops.device_facts import HOPPER, misfit

    if reason := misfit(HOPPER, torch.device("cuda")):
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inner", [88, 3072, 13696, 28672])
@pytest.mark.parametrize("width", [192, 576, 1032, 4096])
def test_gated_products_equal_the_reference(dtype: torch.dtype, inner: int, width: int) -> None:
    from tokenmill.ops import reference
    from tokenmill.ops.triton.gemm.gated import gated_gemm
    from tokenmill.ops.triton.gemm.gated_few import gated_few

    generator = torch.Generator("cuda").manual_seed(inner + width)
    weight = (torch.randn(2 * inner, width, device="cuda", generator=generator) * 0.05).to(dtype)
    for rows in (1, 2, 17, 33, 64, 65, 100, 128, 1000):
        x = torch.randn(rows, width, device="cuda", generator=generator).to(dtype)
        for act in ("silu", "gelu_tanh"):
            expected = reference.act_mul((x.double() @ weight.double().T).to(dtype), act).double()
            for gated in (gated_gemm, gated_few) if rows <= 128 else (gated_gemm,):
                made = gated(x, weight, act).double()
                assert (made - expected).norm() / expected.norm() < (4e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("columns", "inner"), [(88, 200), (960, 576), (1024, 3072), (3584, 18944), (8448, 1032)])
def test_streamed_products_equal_the_reference(dtype: torch.dtype, columns: int, inner: int) -> None:
    from tokenmill.ops.triton.gemm.stream import stream_gemm

    generator = torch.Generator("cuda").manual_seed(columns + inner)
    weight = (torch.randn(columns, inner, device="cuda", generator=generator) * 0.05).to(dtype)
    bias = torch.randn(columns, device="cuda", generator=generator).to(dtype)
    counters = torch.zeros(4 * -(-columns // 64), dtype=torch.int32, device="cuda")
    for rows in (1, 2, 16, 17, 32, 33, 64, 100, 128, 200, 256):
        x = torch.randn(rows, inner, device="cuda", generator=generator).to(dtype)
        for added in (None, bias):
            expected = x.double() @ weight.double().T + (0.0 if added is None else added.double())
            for splits in (None, 1, 2, 3) if rows <= 64 or columns <= 1024 else (None, 1):
                made = stream_gemm(x, weight, added, counters, splits).double()
                assert (made - expected).norm() / expected.norm() < (4e-3 if dtype == torch.bfloat16 else 5e-4)
                assert not counters.any()
            made = stream_gemm(x, weight, added, None).double()
            assert (made - expected).norm() / expected.norm() < (4e-3 if dtype == torch.bfloat16 else 5e-4)
