"""Counts the instructions of packed products on AVX2 and on ARM, by emulators: `python scripts/cpu_instructions.py`.

Counts are no times: they say how much work a product is beside another level's, on no CPU in particular. Needs g++,
g++-aarch64-linux-gnu and qemu-user, which notes every instruction; takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenmill.ops.native import build

COLUMNS = 512
PANELS = (2, 4)  # of a matrix: the difference is what two panels cost
FORMS = {  # of src/formats.h
    **{"f32": 0, "f16": 1, "bf16": 2},
    **{"Q4_0": 3, "Q4_1": 4, "Q4_K": 5, "Q5_0": 6, "Q5_1": 7, "Q5_K": 8, "Q6_K": 9, "Q8_0": 10},
}
# Products of panels of zeros, for each form, number of rows and number of panels; `mark` stands before and
# behind each of them.
PROGRAM = """
#include <cstdlib>
#include "matrix.h"
extern "C" { int tm_run(uint32_t, const void*); int tm_set_level(int); }
using namespace mill;
extern "C" __attribute__((noinline)) void mark() { __asm__ volatile(""); }
int main(int count, char** given) {
    const int level = atoi(given[1]), columns = atoi(given[2]);
    if (tm_set_level(level) != level) return 3;
    uint8_t* memory = static_cast<uint8_t*>(aligned_alloc(64, size_t(4 * panel_bytes(F32, columns))));
    for (int64_t i = 0; i < 4 * panel_bytes(F32, columns); ++i) memory[i] = 0;
    float* out = static_cast<float*>(calloc(16 * 4 * PANEL, 4));
    float* x = static_cast<float*>(calloc(size_t(16 * columns), 4));
    for (int i = 0; i < 16 * columns; ++i) x[i] = 1;
    for (int i = 3; i + 2 < count; i += 3) {
        const int form = atoi(given[i]), rows = atoi(given[i + 1]), panels = atoi(given[i + 2]);
        MatmulArgs a{x, columns, out, 4 * PANEL, nullptr, rows, columns, 1, {{memory, panels * PANEL, form}}};
        tm_run(MATMUL, &a);  // memory that is needed is there afterwards
        mark();
        tm_run(MATMUL, &a);
        mark();
    }
}
"""
PLAIN = ("levels", "pool", "thread_scratch")


@dataclass(frozen=True)
class Target:
    level: str
    machine: str
    compiler: str
    emulator: str

    @property
    def number(self) -> int:
        return [level.name for level in build.levels(self.machine)].index(self.level)


TARGETS = (
    Target("AVX2", "x86_64", "g++", "qemu-x86_64"),
    Target("NEON", "aarch64", "aarch64-linux-gnu-g++", "qemu-aarch64"),
    Target("NEON dot product", "aarch64", "aarch64-linux-gnu-g++", "qemu-aarch64"),
)


def compiled(target: Target, folder: Path) -> Path:
    """A program of the matrix kernels of one level and what they need."""
    kernel, source, program = folder / "matrix.o", folder / "program.cpp", folder / "program"
    source.write_text(PROGRAM)
    flags = [target.compiler, *build.FLAGS, *build.MATH, f"-I{build.SOURCES}"]
    own = [f"-DTM_LEVEL={target.number}", *build.levels(target.machine)[target.number].flags]
    subprocess.run([*flags, *own, "-c", str(build.SOURCES / "kernels" / "matrix.cpp"), "-o", str(kernel)], check=True)
    plain = [str(build.SOURCES / f"{name}.cpp") for name in PLAIN]
    listed = f"-DTM_COMPILED=TM_SOURCE(matrix, {target.number})"
    subprocess.run([*flags, "-static", listed, str(source), *plain, str(kernel), "-o", str(program)], check=True)
    return program


def counted(target: Target, program: Path, cases: list[tuple[int, int, int]]) -> list[int]:
    """The instructions of each case."""
    said = subprocess.run([target.emulator, "-h"], capture_output=True, text=True).stdout
    single = "-one-insn-per-tb" if "one-insn-per-tb" in said else "-singlestep"
    log = program.parent / "log"
    command = [target.emulator, "-cpu", "max", single, "-d", "exec,nochain", "-D", str(log), str(program)]
    numbers = [target.number, COLUMNS, *(number for case in cases for number in case)]
    subprocess.run([*command, *map(str, numbers)], check=True)
    counts, marked = [0], False
    with log.open("rb") as lines:
        for line in lines:
            if not line.startswith(b"Trace"):
                continue
            here = line.endswith(b" mark\n")
            if here and not marked:
                counts.append(0)
            marked = here
            counts[-1] += 1
    log.unlink()
    return counts[1::2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", default="Q4_0,Q4_1,Q4_K,Q5_K,Q6_K,Q8_0,f32,bf16")
    parser.add_argument("--rows", default="1,4", help="of inputs")
    given = parser.parse_args()
    chosen = [(name, rows) for name in given.forms.split(",") for rows in map(int, given.rows.split(","))]
    cases = [(FORMS[name], rows, panels) for name, rows in chosen for panels in PANELS]
    table = []
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            counts = counted(target, compiled(target, Path(folder)), cases)
        table.append([(many - few) / 2 / (COLUMNS / 32) for few, many in zip(counts[::2], counts[1::2], strict=True)])
    print("instructions of 32 columns of 16 outputs")
    print("| form | rows |" + "".join(f" {target.level} |" for target in TARGETS))
    for number, (name, rows) in enumerate(chosen):
        print(f"| {name} | {rows} |" + "".join(f" {column[number]:.0f} |" for column in table))


if __name__ == "__main__":
    main()
