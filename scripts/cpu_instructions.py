"""Counts the instructions of packed products on AVX2 and on ARM, by emulators: `python scripts/cpu_instructions.py`.

Counts are no times: they say how much work a product is beside another level's, on no CPU in particular. Needs g++,
g++-aarch64-linux-gnu and qemu-user, which notes every instruction; takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenmill.ops.native import build

COLUMNS = 1024
GROUPS = COLUMNS // 32
FORMS = {  # of src/formats.h
    **{"f32": 0, "f16": 1, "bf16": 2},
    **{"Q4_0": 3, "Q4_1": 4, "Q4_K": 5, "Q5_0": 6, "Q5_1": 7, "Q5_K": 8, "Q6_K": 9, "Q8_0": 10},
}
# The product of some panels of zeros with some rows.
PROGRAM = """
#include <cstdlib>
#include "matrix.h"
extern "C" { int tm_run(uint32_t, const void*); int tm_set_level(int); }
using namespace mill;
int main(int, char** given) {
    const int level = atoi(given[1]), form = atoi(given[2]), rows = atoi(given[3]), panels = atoi(given[4]);
    if (tm_set_level(level) != level) return 3;
    const size_t bytes = size_t(8 * panel_bytes(form, COLUMNS));
    uint8_t* memory = static_cast<uint8_t*>(aligned_alloc(64, bytes));
    for (size_t i = 0; i < bytes; ++i) memory[i] = 0;
    float* x = static_cast<float*>(calloc(size_t(rows * COLUMNS), 4));
    float* out = static_cast<float*>(calloc(size_t(rows * 8 * PANEL), 4));
    for (int i = 0; i < rows * COLUMNS; ++i) x[i] = 1;
    MatmulArgs a{x, COLUMNS, out, 8 * PANEL, nullptr, rows, COLUMNS, 1, {{memory, panels * PANEL, form}}};
    return tm_run(MATMUL, &a);
}
"""


@dataclass(frozen=True)
class Target:
    name: str
    machine: str
    compiler: tuple[str, ...]
    emulator: tuple[str, ...]
    level: str

    @property
    def number(self) -> int:
        return [level.name for level in build.levels(self.machine)].index(self.level)


ARM = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max")
TARGETS = (
    Target("AVX2", "x86_64", ("g++",), ("qemu-x86_64", "-cpu", "max"), "AVX2"),
    Target("NEON", "aarch64", ("aarch64-linux-gnu-g++",), ARM, "NEON"),
    Target("NEON dot product", "aarch64", ("aarch64-linux-gnu-g++",), ARM, "NEON dot product"),
)


def compiled(target: Target, folder: Path) -> Path:
    place = folder / target.machine
    program = place / "product"
    if not program.exists():
        build.compile_library(place / build.LIBRARY, cross=target.compiler, machine=target.machine)
        source = place / "product.cpp"
        source.write_text(PROGRAM.replace("COLUMNS", str(COLUMNS)))
        flags = ["-std=c++17", "-O2", f"-I{build.SOURCES}", f"-Wl,-rpath,{place}"]
        command = [*target.compiler, *flags, str(source), str(place / build.LIBRARY), "-o", str(program)]
        subprocess.run(command, check=True)
    return program


def count(target: Target, program: Path, form: int, rows: int, panels: int) -> int:
    said = subprocess.run([target.emulator[0], "-h"], capture_output=True, text=True).stdout
    single = "-one-insn-per-tb" if "one-insn-per-tb" in said else "-singlestep"
    log = program.parent / "log"
    command = [*target.emulator, single, "-d", "exec,nochain", "-D", str(log), str(program)]
    subprocess.run([*command, *map(str, (target.number, form, rows, panels))], check=True)
    with log.open("rb") as lines:
        found = sum(line.startswith(b"Trace") for line in lines)
    log.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", default="Q4_0,Q4_1,Q4_K,Q5_K,Q6_K,Q8_0,f32,bf16")
    parser.add_argument("--rows", default="1,4", help="of inputs; dense forms take 6 in the place of 4")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = {target: compiled(target, Path(folder)) for target in TARGETS}
        print("instructions for 32 columns of 16 outputs")
        print(f"{'form':6} {'rows':>4}" + "".join(f"{target.name:>18}" for target in TARGETS))
        for name in given.forms.split(","):
            for rows in map(int, given.rows.split(",")):
                rows = 6 if rows == 4 and FORMS[name] <= 2 else rows
                cells = []
                for target, program in programs.items():
                    few, many = (count(target, program, FORMS[name], rows, panels) for panels in (4, 8))
                    cells.append(f"{(many - few) / 4 / GROUPS:18.1f}")
                print(f"{name:6} {rows:4}" + "".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
