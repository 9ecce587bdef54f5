"""Kernels compile ahead of time for GPUs from Ampere to Blackwell, and fit into what these have; none is run."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels_made import compiled

from tokenmill.plan.solve.gpus import GPUS

# One of each kind of limit: shared memory of wide heads, small codes, a long pipeline, float8.
REPRESENTATIVE = "|".join(
    [
        "^chunk heads of 256$",
        "^weight only int4 groups of 128 4096 x 14336, 16 rows$",
        "^small_gemm 48 x 4096 x 14336$",
        "^rope_kv_write qwen3-0.6b fp8$",
    ]
)
ONE_OF_EACH = {"a100": (8, 0), "a10g": (8, 6), "l4": (8, 9), "b200": (10, 0), "rtx5090": (12, 0)}


@pytest.mark.parametrize("gpu", ONE_OF_EACH)
def test_kernels_compile_and_fit(gpu, tmp_path):
    assert GPUS[gpu].capability == ONE_OF_EACH[gpu]
    made = compiled(REPRESENTATIVE, tmp_path, gpu)
    assert [one["kernel"] for one in made.values()].count("_gemm_kernel") == 2
    assert any(one["kernel"] == "_prefill_kernel" for one in made.values())
    assert any("fp8" in name for name in made) == (ONE_OF_EACH[gpu] >= (8, 9))
    assert all(one["shared"] <= GPUS[gpu].shared for one in made.values())


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ONE_OF_EACH)
def test_all_kernels_compile_and_fit(gpu, tmp_path):
    made = compiled("", tmp_path, gpu, timeout=3600)
    assert len(made) > 150
    assert all(one["shared"] <= GPUS[gpu].shared for one in made.values())
