"""Specializations: which compiled forms of kernels a launch needs, as data that another process can compile from."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITCallable


@dataclass(frozen=True)
class TensorLike:
    """What a kernel's compiled form depends on of a tensor."""

    dtype: torch.dtype
    aligned: bool  # to 16 bytes

    def make(self) -> torch.Tensor:
        """Some tensor like it, in host memory: it is compiled for, never read."""
        return torch.empty(32, dtype=self.dtype)[0 if self.aligned else 1 :]


@dataclass(frozen=True)
class DescriptorLike:
    """The same of a descriptor, through which tiles of a tensor are loaded."""

    module: str  # of its class: Triton and Gluon have one each
    dtype: torch.dtype
    block_shape: tuple[int, ...]
    layout: Any = None  # Gluon's; picklable

    def make(self) -> Any:
        made = importlib.import_module(self.module).TensorDescriptor
        base = torch.empty(self.block_shape, dtype=self.dtype)
        layout = () if self.layout is None else (self.layout,)
        return made.from_tensor(base, list(self.block_shape), *layout)


@dataclass(frozen=True)
class Specialization:
    """One compiled form of one kernel."""

    module: str
    kernel: str  # the name in that module
    args: tuple[Any, ...]  # tensors and descriptors are replaced by what describes them
    meta: tuple[tuple[str, Any], ...]  # constexprs and options

    def jitted(self) -> Any:
        """The kernel as Triton knows it."""
        quick = getattr(importlib.import_module(self.module), self.kernel)
        kernel = getattr(quick, "kernel", quick)
        hash_callees_first(kernel)
        return kernel

    def compile(self) -> Any:
        """Have Triton compile it for the active driver's target, or find it in its cache; nothing is launched."""
        args = [one.make() if isinstance(one, TensorLike | DescriptorLike) else one for one in self.args]
        return self.jitted().warmup(*args, grid=(1,), **dict(self.meta))

    def digest(self, context: str) -> str:
        """Names it across processes and restarts; `context`: versions and the device."""
        text = f"{context}|{self.jitted().cache_key}|{self.args!r}|{sorted(self.meta)!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:40]


_HASHED: set[int] = set()  # ids: Triton's functions are hashed by what is to be computed


def hash_callees_first(function: Any) -> None:
    """Have Triton compute the hashes of what a jitted function calls, and then its own.

    It takes constants of a called function into the caller's hash only if that one has been hashed before. So the hash,
    under which a compiled kernel is kept, would depend on which kernels a process has used so far.
    """
    if id(function) in _HASHED or not isinstance(function, JITCallable):
        return
    _HASHED.add(id(function))
    for name in function.fn.__code__.co_names:
        hash_callees_first(function.fn.__globals__.get(name))
    function.cache_key  # noqa: B018  # computed when it is first asked for


Holder = tuple[Any, tuple[Any, ...]]  # a QuickKernel, and the key under which it keeps the compiled form


@dataclass
class Collected:
    """What launches asked for while nothing was launched, in their order."""

    found: dict[Specialization, list[Holder]] = field(default_factory=dict)

    def add(
        self,
        kernel: Any,  # a QuickKernel
        key: tuple[Any, ...] | None,  # None: it is not one that the kernel would keep
        parameters: list[Any],  # of the kernel, one for each of args
        args: tuple[Any, ...],
        meta: dict[str, Any],
    ) -> None:
        fn = kernel.kernel.fn
        described = tuple(map(_described, args, parameters))
        one = Specialization(fn.__module__, fn.__name__, described, tuple(meta.items()))
        holders = self.found.setdefault(one, [])
        if key is not None and (kernel, key) not in holders:
            holders.append((kernel, key))

    def __len__(self) -> int:
        return len(self.found)


class _Collecting:
    """Whether launches are collected instead of made. One per process, as compiled kernels are."""

    into: Collected | None = None


COLLECTING = _Collecting()


@contextlib.contextmanager
def collect() -> Iterator[Collected]:
    """Kernels launched inside are not launched: their specializations are noted, and outputs are left as they are.

    New tensors hold zeros instead of anything, so that what torch computes from them stays in bounds.
    """
    collected = Collected()
    COLLECTING.into = collected
    try:
        with _ZerosForEmpty():
            yield collected
    finally:
        COLLECTING.into = None


class _ZerosForEmpty(TorchFunctionMode):
    """`torch.empty` and its kin give zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ZEROS.get(func, func)(*args, **(kwargs or {}))


_ZEROS: dict[Any, Any] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


def _described(arg: Any, parameter: Any) -> Any:
    """What Triton tells apart of an argument; numbers are replaced by a small one of their kind."""
    if isinstance(arg, torch.Tensor):
        loose = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        return TensorLike(arg.dtype, loose or arg.data_ptr() % 16 == 0)
    if type(arg).__name__ == "TensorDescriptor":
        shape = tuple(arg.block_shape)
        return DescriptorLike(type(arg).__module__, arg.base.dtype, shape, getattr(arg, "layout", None))
    if type(arg) is float:
        return 0.5
    if type(arg) is int:
        if arg == 1 and not parameter.do_not_specialize:
            return 1
        loose = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        wide = 0 if -(2**31) <= arg < 2**31 else 1 << 40
        return wide + (16 if loose or arg % 16 == 0 else 3)
    return arg
