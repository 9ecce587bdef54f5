"""How kernels are launched: cheaply from the host, and on the device before the previous kernel has ended.

Two things that every kernel of a step takes part in:

    @quick_launch                       # cheap launches; the call stays kernel[grid](tensors and numbers, NAMES=...)
    @triton.jit
    def kernel(x, weight, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
        start_next(PDL)                 # the next kernel may start to do what stands above its own wait
        gain = tl.load(weight + ...)    # a constant of the model: may be read early
        wait_for_previous(PDL)          # from here on, everything that earlier kernels wrote is there
        value = tl.load(x + ...)
        tl.store(out + ..., value * gain)

Cheap launches. Positional arguments are everything that is not a constexpr, in order; constexprs (which come last in
the signature) and options (num_warps, num_stages) are keywords. The first launch of a specialization is Triton's own;
later ones go straight to the compiled kernel. Arguments that are `do_not_specialize`d compile nothing anew, as always.

Programmatic dependent launch. A kernel whose last parameter is `PDL: tl.constexpr = False` takes part; `quick_launch`
sets it, and the launch attribute with it, where the device can do it (`pdl_supported`) and the grid is small enough to
gain by it (`MOST_PROGRAMS`). Nobody passes PDL by hand.
  - Every program calls `wait_for_previous` exactly once on every path, before it ends and before it reads or writes
    anything that another kernel writes or reads. A program that did not wait would break the chain: the kernel after
    the next one could start while the kernel before this one still runs. So no early return above the wait.
  - Above the wait only constants may be read: weights, norm weights, scales of weights, rope tables. They are older
    than the step, and a step begins with a copy of its inputs, or is a graph: what comes first in it starts when
    everything before has ended.
    Positions, slots, block tables, context lengths and lists of tiles are made in the step: read below the wait.
  - `start_next` is a hint and may stand anywhere: the next kernel waits for this one to end, not for the call. It takes
    effect when all programs have called it or ended, so none of this grid is ever kept from starting. First thing in
    the kernel is the rule: while this one runs or waits, the next one is brought onto the device and reads constants.
  - The kernels before and after need not take part: one that does not is waited for, or waits, as a whole.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tokenmill.ops.device_facts import PDL as OVERLAP
from tokenmill.ops.device_facts import QUICK_LAUNCH, release_misfit, usable
from tokenmill.ops.triton.specializations import COLLECTING, hash_callees_first

Describe = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]

# Larger grids hide their start anyway, and the waiting of so many programs costs more than it gains: RoPE of 16,384
# tokens took 218 us with it and 79 us without.
MOST_PROGRAMS = 1024


@lru_cache
def pdl_supported(device: torch.device | int) -> bool:  # or the index of a CUDA device
    """Whether a kernel may be started before the previous one has ended."""
    return usable(OVERLAP, torch.device("cuda", device) if isinstance(device, int) else device)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Everything that earlier kernels wrote may be read below this line, and what they read may be overwritten."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next kernel may be started once every program came here; it still waits for this one to end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_constants(pointers, PDL: tl.constexpr):
    """Start to bring the lines of constants at these pointers into the L2 cache, without waiting for them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def ceil_div(a: int, b: int) -> int:
    """Triton's own cdiv is made for kernels and takes microseconds on the host."""
    return -(-a // b)


def quick_launch(kernel: Any) -> Any:
    """The kernel, with cheap launches; unchanged in the interpreter, where launches are not what takes the time."""
    return QuickKernel(kernel) if isinstance(kernel, JITFunction) else kernel


class FirstLaunches:
    """How often a launch stopped for Triton to compile or load a kernel; after the warm-up that is to be never."""

    count = 0


FIRST_LAUNCHES = FirstLaunches()


class Compiled(NamedTuple):
    """A compiled kernel, ready for launches that only differ in pointers and numbers."""

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]  # constexprs in the order of the signature


class QuickKernel:
    """A jitted kernel that finds what it compiled before under a key that is cheap to compute.

    The key tells apart whatever Triton's specialization does: the device, constexprs and options, the dtype of a
    tensor and whether it is aligned to 16 bytes, the width of an integer and whether it is 1 or a multiple of 16.
    A call that cannot be described in this way goes through Triton every time.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel  # what Triton made: for compiling without a launch
        self._arguments = [p for p in kernel.params if not p.is_constexpr]
        self._constants = {p.name: p.default for p in kernel.params if p.is_constexpr}
        self._takes_part = "PDL" in self._constants
        self._describe: dict[tuple[type, ...], Describe | None] = {}  # by the types of the arguments
        self._compiled: dict[tuple[Any, ...], Compiled | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        current = driver.active
        device = current.get_current_device()
        width, height, depth = (*grid, 1, 1)[:3]
        if self._takes_part and width * height * depth <= MOST_PROGRAMS and pdl_supported(device):
            meta["PDL"] = meta["launch_pdl"] = True
        kinds = tuple(map(type, args))
        if kinds not in self._describe:
            self._describe[kinds] = describe_function(kinds, self._arguments)
        describe = self._describe[kinds]
        if describe is None:
            self._launch_first(grid, None, args, meta)
            return
        key, values = describe(*args)
        key = (device, kinds, *key, *meta, *meta.values())
        compiled = self._compiled.get(key)
        if compiled is None or COLLECTING.into is not None:
            self._launch_first(grid, key, args, meta)
            return
        run, function, metadata, constants = compiled
        stream = current.get_current_stream(device)
        # Neither metadata of the launch nor hooks around it: they are for Triton's own profiler.
        run(width, height, depth, stream, function, metadata, None, None, None, *values, *constants)

    def _launch_first(
        self, grid: tuple[int, ...], key: tuple[Any, ...] | None, args: tuple[Any, ...], meta: dict[str, Any]
    ) -> None:
        """Through Triton, which compiles the kernel or finds it in its cache."""
        if COLLECTING.into is not None:
            if key is None or key not in self._compiled:
                COLLECTING.into.add(self, key, self._arguments, args, meta)
            return
        if key is None or key not in self._compiled:  # it may be there, and only how to launch it again is not known
            FIRST_LAUNCHES.count += 1
            hash_callees_first(self.kernel)
        made = self.kernel[grid](*args, **meta)
        if key is not None and key not in self._compiled:
            self._compiled[key] = self._keep(made, meta)

    def take(self, key: tuple[Any, ...], made: Any, meta: dict[str, Any]) -> None:
        """Remember a kernel that was compiled without a launch; it is brought onto the device now."""
        made.run  # noqa: B018  # Triton loads it when it is first asked how to launch it
        self._compiled[key] = self._keep(made, meta)

    def _keep(self, made: Any, meta: dict[str, Any]) -> Compiled | None:
        """How to launch again what Triton has just launched; None if that is not known."""
        known = not release_misfit(QUICK_LAUNCH) and driver.active.get_current_target().backend == "cuda"
        constants_last = self.kernel.params[: len(self._arguments)] == self._arguments
        if not (known and constants_last and hasattr(made, "packed_metadata")):
            return None
        constants = tuple(meta.get(name, default) for name, default in self._constants.items())
        return Compiled(made.run, made.function, made.packed_metadata, constants)


def describe_function(kinds: tuple[type, ...], parameters: list[Any]) -> Describe | None:
    """A function of arguments of these types: what of them may be compiled in, and the values that a launch takes.

    It is made of source text, because a loop over the arguments takes twice as long. None: not known for such a call.
    """
    key: list[str] = []
    values: list[str] = []
    # An annotation of a type would change how an argument is passed.
    if len(kinds) != len(parameters) or any(parameter.annotation_type for parameter in parameters):
        return None
    for i, (kind, parameter) in enumerate(zip(kinds, parameters)):
        name = f"a{i}"
        aligned = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if issubclass(kind, torch.Tensor):
            key.append(f"{name}.dtype")
            key += [f"(p{i} := {name}.data_ptr()) & 15 == 0"] * aligned
            values.append(f"p{i}" if aligned else f"{name}.data_ptr()")
            continue
        values.append(name)
        if kind is int:
            width = f"{name} >> 31"  # 0 or -1 where 32 bits are enough
            parts = width if not aligned else f"{width} << 1 | ({name} & 15 == 0)"
            key.append(parts if parameter.do_not_specialize else f"'one' if {name} == 1 else {parts}")
        elif kind.__name__ == "TensorDescriptor":
            key.append(f"({name}.base.dtype, *{name}.block_shape, getattr({name}, 'layout', None))")
        elif kind not in (float, bool, type(None)):  # of these only the type matters
            return None
    names = ", ".join(f"a{i}" for i in range(len(kinds)))
    # Values come second: they name what the key computed.
    made: Describe = eval(f"lambda {names}: (({''.join(part + ', ' for part in key)}), ({', '.join(values)},))")
    return made
