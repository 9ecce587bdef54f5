"""Kernels are chosen in one place, from what they declare: nobody else looks at devices, kernels or kinds of scheme."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenmill.ops.device_facts import HOPPER
from tokenmill.ops.matmul import matmul_kernels

PACKAGE = Path(__file__).resolve().parents[2] / "tokenmill"
FACTS = re.compile(r"get_device_capability|get_device_properties|multi_processor_count|triton\.__version__")
SCHEMES = re.compile(r"isinstance\([^)\n]*\b(Packed|Dense|InvariantDense|WeightOnly|RowScaled|Fp8|W8A8)\b")


def lines_with(pattern: re.Pattern[str], *left_out: str) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(left_out)
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]


def test_facts_of_devices_are_asked_for_in_one_file():
    """Beside it, only the names of what was compiled say for which GPU and by which Triton."""
    assert lines_with(FACTS, "ops/device_facts.py", "ops/triton/compiler.py") == []


def test_nobody_outside_of_quant_asks_which_scheme_it_is():
    assert lines_with(SCHEMES, "quant/") == []


def test_schemes_know_no_gpu_kernels():
    found = lines_with(re.compile(r"import tokenmill\.ops\.triton|from tokenmill\.ops\.triton"), "ops/")
    assert [line for line in found if line.startswith("quant/")] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kernel_declares_what_it_can_do(device: str):
    if device == "cuda":
        pytest.importorskip("triton")
    kernels = list(matmul_kernels(device))
    for weight in {weight for kernel in kernels for weight in kernel.weights}:
        names = [kernel.name for kernel in kernels if weight in kernel.weights]
        assert len(names) == len(set(names)), f"of {weight}, two kernels have one name"
    for kernel in kernels:
        assert kernel.weights and kernel.dtypes and kernel.rows[0] <= kernel.rows[1]
        assert (kernel.inputs is None) == (kernel.quantize is None)
        assert kernel.requires is None or kernel.devices == ("cuda",)
        assert kernel.requires is not HOPPER or kernel.rank == 30  # what is made for one GPU goes before others
