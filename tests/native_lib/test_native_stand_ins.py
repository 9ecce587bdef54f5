"""AVX-VNNI and AMX, on CPUs that lack them: the library is built with other instructions in the place of theirs.

AVX-VNNI's product is the one of AVX-512 in another encoding; AMX's tile registers are a model in C++ (src/tiles.h)
that stops the program where the CPU would. Everything else is the code that these CPUs run.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from blocks import QUANTIZED, packed, random_blocks
from test_native_matrix import (  # noqa: F401  run again in this module, with the fixtures below
    test_a_row_does_not_depend_on_the_others_nor_on_threads,
    test_an_odd_number_of_groups,
    test_as_many_groups_may_have_outliers_as_can_be,
    test_outliers_cost_the_others_nothing,
    test_quantized_products_equal_their_definition,
    test_segments_of_several_forms_bias_and_strided_inputs,
)

from tokenmill.cache import native_dir
from tokenmill.ops.native import build, library
from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.matrix import PackedMatrix

if "AMX" not in library.LEVEL_NAMES:
    pytest.skip("these are levels of x86", allow_module_level=True)

STAND_IN = ("-DTM_STAND_IN", "-O1")
AVX2, AVX_VNNI, VNNI, AMX = map(library.LEVEL_NAMES.index, ("AVX2", "AVX-VNNI", "AVX-512 VNNI", "AMX"))
BELOW = {AVX_VNNI: AVX2, AMX: VNNI}  # with the same steps in floats
_KERNELS = {0: None} | dict.fromkeys((AVX2, AVX_VNNI, VNNI, AMX), ("matrix",))  # no more than is needed here


@pytest.fixture(scope="module")
def native() -> Iterator[library.Library]:
    """The library with stand-ins, in the place of the real one."""
    if build.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    plain = library.load()
    if isinstance(plain, str) or not plain.has_level(VNNI):  # found out before half a minute of compiling
        pytest.skip("this CPU has no AVX-512 VNNI, which takes the place of the others")
    levels = [dataclasses.replace(level, kernels=_KERNELS.get(n, ())) for n, level in enumerate(build.LEVELS["x86_64"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "LEVELS", {"x86_64": tuple(levels)})
        path = native_dir() / build.fingerprint(STAND_IN) / build.LIBRARY
        if not path.is_file():
            build.compile_library(path, extra=STAND_IN)
    found = library.Library(path)
    if not (found.has_level(AVX_VNNI) and found.has_level(AMX)):
        pytest.skip("the compiler is too old for one of them")
    found.threads = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda tell=None: found)
        yield found


@pytest.fixture(params=[AVX_VNNI, AMX], ids=lambda level: library.LEVEL_NAMES[level])
def level(request: pytest.FixtureRequest, native: library.Library) -> Iterator[int]:
    native.level = request.param
    assert native.level == request.param
    yield request.param
    native.level = native.best_level


def with_outliers(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    return torch.where(torch.rand(x.shape, generator=generator) < 0.02, 20 * x, x)


# More than 16 tiles of inputs, more than 1024 columns, and less of both.
@pytest.mark.parametrize(("rows", "columns", "inputs"), [(50, 768, 16), (33, 1280, 37), (16, 2304, 290), (7, 256, 48)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_new_level_has_the_bits_of_the_old_one(
    name: str, rows: int, columns: int, inputs: int, level: int, native: library.Library
) -> None:
    matrix = packed(random_blocks(QUANTIZED[name], rows, columns, np.random.default_rng(rows)), QUANTIZED[name])
    x, bias = with_outliers(inputs, columns), torch.randn(rows)
    found = matrix.matmul(x, bias)
    native.level = BELOW[level]
    assert torch.equal(found, matrix.matmul(x, bias))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_an_odd_number_of_groups_after_a_piece(name: str, level: int, native: library.Library) -> None:
    matrix = packed(random_blocks(QUANTIZED[name], 20, 1120, np.random.default_rng(1)), QUANTIZED[name])
    x = with_outliers(32, 1120)
    found = matrix.matmul(x)
    native.level = BELOW[level]
    assert torch.equal(found, matrix.matmul(x))


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_not_finite_shows_in_its_own_row_of_a_tile_only(name: str, level: int) -> None:
    matrix = packed(random_blocks(QUANTIZED[name], 16, 512, np.random.default_rng(5)), QUANTIZED[name])
    x = torch.ones(16, 512)
    x[5, 17] = float("inf")
    found = matrix.matmul(x).isfinite()
    assert not found[5].any() and found[torch.arange(16) != 5].all()


def test_segments_whose_tiles_have_other_shapes(level: int, native: library.Library) -> None:
    random, parts = np.random.default_rng(3), ("Q6_K", "Q4_K", "Q8_0")
    matrix = PackedMatrix(70, 256)
    for name, rows in zip(parts, (20, 16, 31), strict=True):
        raw = random_blocks(QUANTIZED[name], rows, 256, random)
        matrix.append_blocks(raw.reshape(-1), OF_GGUF[QUANTIZED[name]], rows)
    matrix.append_floats(torch.randn(3, 256))
    x = with_outliers(40, 256)
    found = matrix.matmul(x)
    native.level = BELOW[level]
    assert torch.equal(found, matrix.matmul(x))


CONFIGURED = "TileShapes s; s.rows[0] = s.rows[1] = 16, s.rows[2] = 8, s.bytes[0] = s.bytes[2] = 64, s.bytes[1] = 32;"
RIGHT = "tile_load<1>(memory, 32); tile_load<2>(memory, 64); tile_dot<0, 1, 2>(); tile_store<0>(memory, 64);"


@pytest.mark.parametrize(
    ("program", "allowed"),
    [
        (f"{CONFIGURED} TilesInUse tiles(s); {RIGHT}", True),
        (f"{CONFIGURED} {{ TilesInUse tiles(s); }} {RIGHT}", False),  # released before
        (f"{CONFIGURED} s.rows[0] = 17; TilesInUse tiles(s);", False),
        (f"{CONFIGURED} s.bytes[2] = 0; TilesInUse tiles(s);", False),
        (f"{CONFIGURED} s.palette = 0; TilesInUse tiles(s); {RIGHT}", False),
        (f"{CONFIGURED} s.rows[2] = 4; TilesInUse tiles(s); {RIGHT}", False),  # less than the other factor's columns
        (f"{CONFIGURED} s.rows[1] = 8; TilesInUse tiles(s); {RIGHT}", False),  # less than the sums
        (f"{CONFIGURED} TilesInUse tiles(s); tile_zero<3>();", False),
    ],
)
def test_the_model_refuses_what_the_cpu_would(program: str, allowed: bool, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path / "tiles.cpp"
    source.write_text(
        '#define TM_NS tiles_model\n#include "tiles.h"\nusing namespace tiles_model;\n'
        f"alignas(64) uint8_t memory[1024];\nint main() {{ {program} }}\n"
    )
    flags, binary = ("-std=c++17", "-DTM_STAND_IN", f"-I{build.SOURCES}"), str(tmp_path / "tiles")
    subprocess.run([compiler, *flags, str(source), "-o", binary], check=True)
    done = subprocess.run([binary])
    assert done.returncode == (0 if allowed else -signal.SIGILL)
