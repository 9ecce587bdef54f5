"""One registry of ops: which implementations exist, what each can do, and which one is used and why.

The products of linear layers are chosen in the same way, but by number of rows: ops/matmul.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.device_facts import LAUNCH_FEATURES, Feature, Requirement, misfit, passed_over
from tokenmill.ops.types import DecodeInputs, KeptPaths, TreeInputs

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op, with what it declares it can do."""

    op: str
    name: str
    fn: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATS
    head_dims: tuple[int, int] = (1, 1 << 20)  # smallest and largest head size
    block_sizes: tuple[int, ...] | None = None  # None: any
    # May be recorded in a CUDA graph. On a CPU, steps are recorded in a graph, which takes native ops only: one that is
    # not may declare this, too, and the recording itself refuses it (NotRecordableError).
    capture_safe: bool = False
    # A query's bits depend on its own inputs alone: not on other rows, on their number, nor on how rows are chunked.
    batch_invariant: bool = False
    kv_forms: tuple[str, ...] = ()  # quantized KV caches it reads or writes, by the names of ops/kv_forms.py
    kv_requires: Mapping[str, Requirement] = field(default_factory=dict)  # by those names, where a form needs more
    requires: Requirement | None = None  # of the GPU and of Triton
    features: tuple[Feature, ...] = ()  # faster ways inside of it, which it takes where the device has them
    tails: bool = False  # attention between the nodes of trees (`AttentionBatch.tails`)
    sliced: bool = False  # sums that ranks may divide are computed in a given number of `slices`
    groups: bool = False  # routing knows experts in groups, of which only the best are searched
    optional: bool = False  # an op that whoever calls it can do without
    rank: int = 0  # the highest rank that fits is chosen


@dataclass(frozen=True)
class Need:
    """What a model asks of its ops."""

    device: str
    dtype: torch.dtype
    head_dim: int = 64
    block_size: int = 16
    batch_invariant: bool = False  # only implementations that declare it
    kv_form: str | None = None  # how the KV cache is quantized; None: it holds floats


Refused = tuple[str, Implementation, str]  # an op, what could be better for it, and why it does not fit


class Ops:
    """The chosen implementation of every op, callable by name: `ops.rms_norm(...)`."""

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rope_kv_write: Callable[..., None]
    rope: Callable[..., None]
    place_kv: Callable[..., None]
    attention: Callable[..., torch.Tensor]
    act_mul: Callable[..., torch.Tensor]
    add: Callable[..., torch.Tensor]
    scaled: Callable[..., torch.Tensor]
    soft_cap: Callable[..., torch.Tensor]
    moe: Callable[..., torch.Tensor]
    per_head: Callable[..., torch.Tensor]
    concat: Callable[..., torch.Tensor]
    sample: Callable[..., torch.Tensor]
    logprobs: Callable[..., torch.Tensor]
    shape: Callable[..., None]
    decode_inputs: Callable[..., DecodeInputs]
    keep_sampled: Callable[..., torch.Tensor | None]
    tree_inputs: Callable[..., TreeInputs]
    keep_tree: Callable[..., KeptPaths]
    move_kv: Callable[..., None]
    grow_tree: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    add_low_rank: Callable[..., torch.Tensor]

    def __init__(
        self,
        chosen: dict[str, Implementation],
        reasons: dict[str, str],
        refused: Iterable[Refused] = (),
        batch_invariant: bool = False,
    ) -> None:
        self.chosen = chosen
        self.batch_invariant = batch_invariant  # somebody asked for that, and all are
        self.reasons = reasons
        self.refused = list(refused)  # better ones that do not fit
        for op, implementation in chosen.items():
            setattr(self, op, implementation.fn)

    def capture_safe(self, with_moe: bool) -> bool:
        """Whether a step of these ops may be recorded; with_moe: it has experts of floats. Adapters are not
        asked for here: who has them sees to it.
        """
        unused = {"add_low_rank"} if with_moe else {"add_low_rank", "moe"}
        return all(one.capture_safe for op, one in self.chosen.items() if op not in unused)

    def report(self) -> list[str]:
        return [f"{op}: {implementation.name} ({self.reasons[op]})" for op, implementation in self.chosen.items()]

    def passed_over(self, device: torch.device, dtype: torch.dtype, with_moe: bool) -> list[str]:
        """What would be faster, why it is not used, and what is done instead; in the words of who was passed over."""
        by_reason: dict[tuple[str, str], list[str]] = {}
        for op, implementation, reason in self.refused:
            by_reason.setdefault((implementation.name, reason), []).append(op)
        lines = [f"{name} ({', '.join(ops)}): {reason}" for (name, reason), ops in by_reason.items()]
        used = [one for op, one in self.chosen.items() if op != "moe" or with_moe]
        inside = [one for used_one in used for one in used_one.features if one.dtypes is None or dtype in one.dtypes]
        launched = LAUNCH_FEATURES if any(one.name == "triton" for one in used) else ()
        return [*lines, *passed_over([*dict.fromkeys(inside), *launched], device)]


def select(need: Need, prefer: str | dict[str, str] | None = None) -> Ops:
    """Choose an implementation for every op. `prefer` names one for all ops (where it exists) or per op."""
    by_op: dict[str, list[Implementation]] = {}
    for implementation in implementations(need.device, need.batch_invariant):
        by_op.setdefault(implementation.op, []).append(implementation)
    names = {one.name for several in by_op.values() for one in several}
    if isinstance(prefer, str) and prefer not in names:
        raise ConfigError(f"ops is {prefer!r}; on {need.device} there are {', '.join(sorted(names))}")
    if isinstance(prefer, dict) and (unknown := prefer.keys() - by_op.keys()):
        raise ConfigError(f"ops names {', '.join(sorted(unknown))}; the ops are {', '.join(by_op)}")
    chosen, reasons, refused = {}, {}, []
    for op, candidates in by_op.items():
        wanted = prefer.get(op) if isinstance(prefer, dict) else prefer
        plain = {one.name for one in candidates} & {prefer, "reference"} if isinstance(prefer, str) else {""}
        if not plain and all(one.optional for one in candidates):
            continue  # nobody who asks for plain ops gets another one that he could do without
        misfits = [(op, one, why_not) for one in candidates if (why_not := _misfit(one, need))]
        if len(misfits) < len(candidates) or not all(one.optional for one in candidates):
            chosen[op], reasons[op] = _choose(op, candidates, misfits, wanted, strict=isinstance(prefer, dict))
            misfits = [one for one in misfits if one[1].rank > chosen[op].rank]
        refused += misfits if wanted is None else []
    return Ops(chosen, reasons, refused, need.batch_invariant)


def implementations(device: str, batch_invariant: bool = False) -> Iterable[Implementation]:
    """Every implementation that can be imported for this device; modules load only when they may be used.

    Those that are there for batch invariance alone are slower than others: nobody gets them without asking for it.
    """
    modules = ["tokenmill.ops.reference", "tokenmill.ops.reference_decode"]
    modules += ["tokenmill.ops.reference_tree", "tokenmill.ops.reference_low_rank"]
    modules += ["tokenmill.ops.reference_place", "tokenmill.ops.cpu"]
    modules.append("tokenmill.ops.triton" if device == "cuda" else "tokenmill.ops.native.implementations")
    if batch_invariant:
        modules.append("tokenmill.ops.invariant")
    if batch_invariant and device == "cuda":
        modules += ["tokenmill.ops.triton.attention.invariant", "tokenmill.ops.triton.moe.invariant"]
    for module in modules:
        yield from importlib.import_module(module).IMPLEMENTATIONS


def _choose(
    op: str, candidates: list[Implementation], misfits: list[Refused], wanted: str | None, strict: bool
) -> tuple[Implementation, str]:
    refused = {one.name: why_not for _, one, why_not in misfits}
    fitting = [one for one in candidates if one not in [misfit for _, misfit, _ in misfits]]
    for candidate in fitting:
        if candidate.name == wanted:
            return candidate, "asked for"
    if wanted and strict:
        reason = refused.get(wanted, f"there are only {', '.join(c.name for c in candidates)}")
        raise ConfigError(f"op {op!r} cannot use {wanted!r}: {reason}")
    if not fitting:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigError(f"there is no op {op!r} for what was asked: {reasons}")
    best = max(fitting, key=lambda candidate: candidate.rank)
    others = "; ".join(f"not {name}: {why}" for name, why in refused.items())
    return best, "the fastest that fits" + (f"; {others}" if others else "")


def _misfit(candidate: Implementation, need: Need) -> str:
    if need.device not in candidate.devices:
        return f"runs on {'/'.join(candidate.devices)}, not {need.device}"
    if need.dtype not in candidate.dtypes:
        return f"no {str(need.dtype).removeprefix('torch.')}"
    if need.batch_invariant and not candidate.batch_invariant:
        return "not batch-invariant"
    if candidate.requires is not None and (reason := misfit(candidate.requires, torch.device(need.device))):
        return reason
    if candidate.op in ("attention", "rope_kv_write", "rope", "place_kv"):
        low, high = candidate.head_dims
        if not low <= need.head_dim <= high:
            return f"head size {need.head_dim} is outside {low}-{high}"
        if candidate.block_sizes and need.block_size not in candidate.block_sizes:
            return f"block size {need.block_size} is not one of {candidate.block_sizes}"
        if need.kv_form is not None and need.kv_form not in candidate.kv_forms:
            return f"no {need.kv_form} KV cache"
        of_form = candidate.kv_requires.get(need.kv_form or "")
        if of_form is not None and (reason := misfit(of_form, torch.device(need.device))):
            return f"a KV cache of {need.kv_form} {reason}"
    return ""
