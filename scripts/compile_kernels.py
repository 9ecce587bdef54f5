"""Compile every Triton kernel for a GPU on a machine that has none, and say what the compiler made of it.

    python scripts/compile_kernels.py                          # every kernel; exit status 1 if one is refused
    python scripts/compile_kernels.py --gpu l4                 # for another GPU than an H200
    python scripts/compile_kernels.py --only 'hopper'          # cases whose name matches
    python scripts/compile_kernels.py --save triton36.json     # registers, spills, shared memory, wgmma instructions
    python scripts/compile_kernels.py --compare triton36.json  # what another release of Triton does worse

To try another release, put it first: PYTHONPATH=/where/it/was/unpacked python scripts/compile_kernels.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tokenmill.ops import device_facts  # noqa: E402
from tokenmill.plan.solve.gpus import GPUS, Gpu  # noqa: E402


@dataclass(frozen=True)
class Made:
    """What a kernel became."""

    kernel: str
    num_warps: int
    shared: int
    registers: int = 0
    stack: int = 0  # bytes of a thread
    spills: int = 0  # instructions that move registers to or from that stack
    wgmma: int = 0
    mma: int = 0
    instructions: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression that the name of a case has to match")
    parser.add_argument("--gpu", default="h200", choices=[*GPUS], help="what is compiled for (default h200)")
    parser.add_argument("--save", type=Path, help="write what was made to this file")
    parser.add_argument("--compare", type=Path, help="a file of --save: print what became worse")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    options = parser.parse_args()
    gpu = GPUS[options.gpu]
    recorder = pretend_to_have(gpu)
    import kernel_cases

    pretend_devices(gpu)
    print(f"triton {triton.__version__} for sm_{recorder.arch}", flush=True)
    began, refused, passed, made = time.perf_counter(), 0, 0, {}
    for name, call, requires in kernel_cases.all_cases():
        if not re.search(options.only, name):
            continue
        if device_facts.gpu_misfit(requires, torch.device("meta")):  # nobody would launch it there
            passed += 1
            continue
        recorder.kernels.clear()
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Triton prints what ptxas refuses, thousands of lines
                call()
        except Exception as error:
            refused += 1
            print(f"REFUSED {name}: {type(error).__name__}: {reason_of(error)}", flush=True)
            continue
        details = options.save or options.compare
        kernels = [describe(kernel) if details else outline(kernel) for kernel in recorder.kernels]
        made |= {f"{name}: {kernel.kernel} {i}": kernel for i, kernel in enumerate(kernels)}
        if options.verbose:
            print(f"{name}: {', '.join(kernel.kernel for kernel in kernels) or 'nothing new'}", flush=True)
    missing = [] if options.only or passed else sorted(kernels_of_the_package() - recorder.seen)
    if missing:
        print(f"no case compiles {', '.join(missing)}")
    left_out = f", {passed} left out that this GPU is not given" if passed else ""
    print(f"{len(made)} kernels compiled, {refused} cases refused{left_out}, {time.perf_counter() - began:.0f} s")
    if options.save:
        options.save.write_text(json.dumps({name: asdict(one) for name, one in made.items()}, indent=1))
    if options.compare:
        before = {name: Made(**one) for name, one in json.loads(options.compare.read_text()).items()}
        for line in worse(before, made):
            print(line)
    return int(bool(refused or missing))


# The device that is not there


class Recorder:
    """Stands for the driver: knows a device, and keeps what was compiled for it."""

    def __init__(self, gpu: Gpu) -> None:
        self.arch = 10 * gpu.capability[0] + gpu.capability[1]
        self.kernels: list[Any] = []  # compiled since somebody looked last
        self.seen: set[str] = set()
        self._known: set[str] = set()
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": gpu.shared},
            load_binary=lambda name, binary, shared, device: (1, 1, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *launch: None

    def keep(self, name: str, kernel: Any) -> None:
        self.seen.add(name)
        if kernel.hash not in self._known:
            self._known.add(kernel.hash)
            self.kernels.append(kernel)
        kernel._init_handles()  # asks for more shared memory than there is: an error, as on the device


def pretend_to_have(gpu: Gpu) -> Recorder:
    """From here on kernels are compiled for this GPU, and launches end before the device is asked."""
    recorder = Recorder(gpu)
    driver.set_active(recorder)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        recorder.keep(f"{self.fn.__module__}.{self.fn.__name__}", kernel)
        return kernel

    JITFunction.run = compile_only
    return recorder


def pretend_devices(gpu: Gpu) -> None:
    """Tensors without memory stand for tensors of the GPU in the rules that choose kernels."""
    device_facts.capability = lambda device: gpu.capability
    device_facts.shared_bytes = lambda device: gpu.shared
    asked = {name: getattr(device_facts, name) for name in ("usable", "room", "reads_shared", "copies_tiles")}
    answers = {name: partial(answer_of, question) for name, question in asked.items()}
    answers["multiprocessors"] = lambda device: gpu.multiprocessors
    answers["pdl_supported"] = lambda device: answers["usable"](device_facts.PDL, device)
    for module in package_modules():
        for name in answers.keys() & vars(module).keys():
            setattr(module, name, answers[name])


def answer_of(question: Callable[..., Any], *arguments: Any) -> Any:
    """Of a question about a device, which is the last of its arguments."""
    return question(*arguments[:-1], torch.device("cuda", 0))


def package_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("tokenmill.ops.triton")]


def kernels_of_the_package() -> set[str]:
    """Those that are launched; functions that only other kernels call are compiled with them."""
    found = set()
    for module in package_modules():
        for value in vars(module).values():
            if type(value).__name__ == "QuickKernel":
                found.add(f"{value.kernel.fn.__module__}.{value.kernel.fn.__name__}")
    return found


# What was made


def outline(kernel: Any) -> Made:
    return Made(kernel.metadata.name, kernel.metadata.num_warps, kernel.metadata.shared)


def describe(kernel: Any) -> Made:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        code = tool("cuobjdump", "-sass", file.name)
    entry = usage[usage.index(f"Function {kernel.metadata.name}") :]
    registers, stack = (int(re.findall(name + r":(\d+)", entry)[0]) for name in ("REG", "STACK"))
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", code)
    count = lambda *names: sum(one.split(".")[0] in names for one in operations)  # noqa: E731
    return Made(
        kernel.metadata.name,
        kernel.metadata.num_warps,
        kernel.metadata.shared,
        registers,
        stack,
        spills=count("STL", "LDL"),
        wgmma=count("HGMMA", "IGMMA", "QGMMA"),
        mma=count("HMMA", "IMMA", "QMMA"),
        instructions=len(operations),
    )


def tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def worse(before: dict[str, Made], after: dict[str, Made]) -> list[str]:
    """Kernels that spill more or lost instructions of the tensor cores."""
    lines = []
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if new.spills > old.spills or new.wgmma < old.wgmma or new.mma < old.mma or new.shared > 1.1 * old.shared:
            changed = {k: (a, b) for (k, a), b in zip(asdict(old).items(), asdict(new).values()) if a != b}
            lines.append(f"worse? {name}: " + ", ".join(f"{k} {a} -> {b}" for k, (a, b) in changed.items()))
    return sorted(lines)


def reason_of(error: BaseException) -> str:
    """The innermost message: Triton wraps an error once for every function that called the one at fault."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[-240:]


if __name__ == "__main__":
    sys.exit(main())
