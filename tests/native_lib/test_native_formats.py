"""Weights are stored exactly, whatever bytes a file holds, and nothing outside of them is read or written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from blocks import DENSE, QUANTIZED, meaning, packed, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.ops.native import build
from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.library import library
from tokenmill.ops.native.matrix import PackedMatrix


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_weight_is_exact(name: str, level: int) -> None:
    raw = random_blocks(QUANTIZED[name], 37, 512, np.random.default_rng(0))
    assert torch.equal(packed(raw, QUANTIZED[name]).take_rows(torch.arange(37)), meaning(raw, QUANTIZED[name]))


@pytest.mark.parametrize("name", DENSE)
def test_floats_come_back_as_they_were(name: str, level: int) -> None:
    weight = torch.randn(21, 35).to(DENSE[name])
    weight[3, 4] = 1e-7  # smaller than the smallest normal f16
    weight[5, 6] = float("inf")
    matrix = PackedMatrix(21, 35)
    matrix.append_floats(weight)
    assert torch.equal(matrix.take_rows(torch.arange(21)), weight.float())


@given(name=st.sampled_from(sorted(QUANTIZED)), seed=st.integers(0, 1 << 30), rows=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_bytes_mean_what_the_format_says(name: str, seed: int, rows: int) -> None:
    library()
    format = OF_GGUF[QUANTIZED[name]]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, format.size * (256 // format.values)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = meaning(raw, QUANTIZED[name])
    matrix = packed(raw, QUANTIZED[name])
    torch.testing.assert_close(matrix.take_rows(torch.arange(rows)), expected, rtol=1e-6, atol=0, equal_nan=True)
    sane = expected.isfinite().all(dim=1) & (expected.abs().amax(dim=1) < 1e30)
    assert matrix.matmul(torch.ones(2, 256))[:, sane].isfinite().all()


def test_rows_that_are_not_there_are_zero() -> None:
    raw = random_blocks(QUANTIZED["Q8_0"], 20, 32, np.random.default_rng(0))
    found = packed(raw, QUANTIZED["Q8_0"]).take_rows(torch.tensor([-1, 20, 1 << 40, 19]))
    assert not found[:3].any() and found[3].any()


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_products_are_clean_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """A program of its own, since Python and torch are not built for these."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    stand_in = "-DTM_STAND_IN"  # so that every level is run, see test_native_stand_ins.py
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1", "-g", "-fno-omit-frame-pointer", stand_in)
    shared, program = tmp_path / build.LIBRARY, tmp_path / "stress"
    build.compile_library(shared, extra=flags)
    source = Path(__file__).parent / "matrix_stress.cpp"
    command = [compiler, "-std=c++17", *flags, f"-I{build.SOURCES}", str(source), str(shared), "-pthread"]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}", "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_the_suffix_index_is_clean_under_a_sanitizer(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "stress"
    sources = [str(Path(__file__).parent / "suffix_stress.cpp"), str(build.SOURCES / "suffix_index.cpp")]
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]
    subprocess.run([compiler, "-std=c++17", *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout[-2000:] + done.stderr[-4000:]
