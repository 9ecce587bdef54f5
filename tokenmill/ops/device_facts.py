"""What kernels need of a GPU and of Triton, and whether a device has it: facts that are asked for nowhere else."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

Version = tuple[int, int]  # of Triton: the release; of a GPU: its compute capability


@dataclass(frozen=True)
class Requirement:
    """What an implementation needs; the first and the last of a range are both in it."""

    gpus: tuple[Version, Version] | None = None  # None: any
    gpu_name: str = ""
    releases: tuple[Version, Version] | None = None  # of Triton; None: any
    shared_bytes: int = 0  # that one program may have
    triton: bool = True


@dataclass(frozen=True)
class Feature:
    """A faster way inside of an op, or to launch kernels, that not every GPU and not every Triton can have."""

    name: str
    instead: str  # what is done where it cannot be used
    requires: Requirement
    dtypes: tuple[torch.dtype, ...] | None = None  # of the model; None: any


# Every kernel compiles with these for Hopper (scripts/compile_kernels.py). Gluon, the language of the Hopper kernels,
# still changes: what was renamed is in gluon_names.py. A later release may work, but nobody has tried it.
_KNOWN = ((3, 6), (3, 9))
_LATEST = (99, 99)
_HOPPER_OR_LATER = ((9, 0), _LATEST)

HOPPER = Requirement(((9, 0), (9, 99)), "a Hopper GPU", _KNOWN)  # kernels in Gluon, with warpgroup instructions
# Products with weights in small codes, and of int8 with int8: bfloat16, int8, and copies that nobody waits for.
PRODUCTS = Requirement(((8, 0), _LATEST), "an Ampere GPU or a later one")
# Numbers of float8: to make them, to multiply them, and to widen them in one instruction.
FLOAT8 = Requirement(((8, 9), _LATEST), "an Ada GPU or a later one")
# Where the matrix library is known to have products of float8 with a scale for every row.
FLOAT8_LIBRARY = Requirement(_HOPPER_OR_LATER, "a Hopper GPU or a later one", shared_bytes=160 << 10)
# Rows multiplied alike however many there are: how long a chain of instructions is, is known of these only.
INVARIANT = FLOAT8_LIBRARY

_HOPPER_SHARED = 227 << 10  # assumed where nothing is known: by Triton's interpreter, and by a torch that does not say
_ASIDE = 1 << 10  # barriers, and what sums pass between warps

_HALVES = (torch.bfloat16, torch.float16)
HOPPER_ATTENTION = Feature("warp-specialised attention", "long chunks take the plain kernel", HOPPER, _HALVES)
HOPPER_MOE = Feature("warp-specialised MoE", "experts take the plain grouped products", HOPPER, _HALVES)
# How a compiled kernel is launched directly, the same in these releases:
# run(grid x, y, z, stream, function, packed metadata, launch metadata, enter hook, exit hook, *all arguments in order).
QUICK_LAUNCH = Feature(
    "quick launches", "kernels are launched by Triton, which takes the host longer", Requirement(releases=_KNOWN)
)
PDL = Feature(
    "programmatic dependent launch",
    "kernels wait for the one before to end",
    Requirement(_HOPPER_OR_LATER, "a Hopper GPU or a later one"),
)
LAUNCH_FEATURES = (QUICK_LAUNCH, PDL)


def triton_version() -> str:
    """Of the Triton that is installed; empty: none is."""
    if importlib.util.find_spec("triton") is None:
        return ""
    import triton

    return str(triton.__version__)


def release() -> Version:
    found = re.match(r"(\d+)\.(\d+)", triton_version())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def capability(device: torch.device) -> Version:
    """The compute capability of an NVIDIA GPU; (0, 0) where there is none, and its kernels are only looked at."""
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):
        return 0, 0


def shared_bytes(device: torch.device) -> int | None:
    """Shared memory that one program may have; None: this torch does not say."""
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return None if found is None else int(found)


@lru_cache
def room(device: torch.device) -> int:
    """Shared memory that launch shapes may count on: what one program may have, less what the compiler takes aside."""
    known = shared_bytes(device) if device.type == "cuda" else None
    return (_HOPPER_SHARED if known is None else known) - _ASIDE


@lru_cache
def reads_shared(device: torch.device) -> bool:
    """Whether products read shared memory by themselves (wgmma, tcgen05), and not what threads have loaded from it:
    a pipeline then holds one stage more.
    """
    return device.type != "cuda" or (9, 0) <= capability(device) < (12, 0)


@lru_cache
def copies_tiles(device: torch.device) -> bool:
    """Whether there is an engine that copies whole tiles into shared memory."""
    return device.type != "cuda" or capability(device) >= (9, 0)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 2  # Triton's interpreter: few, so that small tests reach both sides of the rules


def misfit(of: Requirement | Feature, device: torch.device) -> str:
    """Why this cannot be used; empty where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    return release_misfit(of) or gpu_misfit(of, device)


def release_misfit(of: Requirement | Feature) -> str:
    requires = of.requires if isinstance(of, Feature) else of
    if requires.triton and not triton_version():
        return "needs Triton, which is not installed"
    if requires.releases is None or requires.releases[0] <= release() <= requires.releases[1]:
        return ""
    first, last = ("{}.{}".format(*version) for version in requires.releases)
    return f"needs Triton {first} to {last} and this is {triton_version()}"


def gpu_misfit(of: Requirement | Feature, device: torch.device) -> str:
    requires = of.requires if isinstance(of, Feature) else of
    found = capability(device)
    if requires.gpus is not None and not requires.gpus[0] <= found <= requires.gpus[1]:
        return f"needs {requires.gpu_name} and this has compute capability {'.'.join(map(str, found))}"
    if requires.shared_bytes:
        shared = shared_bytes(device)
        if shared is not None and shared < requires.shared_bytes:
            needed, has = requires.shared_bytes >> 10, shared >> 10
            return f"needs {needed} KiB of shared memory and this GPU has {has}"
    return ""


@lru_cache
def usable(of: Requirement | Feature, device: torch.device) -> bool:
    return not misfit(of, device)


def passed_over(features: Iterable[Feature], device: torch.device) -> list[str]:
    """A sentence for each of these that cannot be used: why, and what is done instead."""
    told = ((feature, misfit(feature, device)) for feature in features)
    return [f"{feature.name}: {reason}; {feature.instead}" for feature, reason in told if reason]


def outdated(device: torch.device) -> str | None:
    """What this GPU could run with another release of Triton, in a sentence for who has not asked."""
    fast = HOPPER_ATTENTION
    if (reason := release_misfit(fast)) and not gpu_misfit(fast, device):
        return f"some of the fastest GPU kernels are not used: {fast.name} {reason}; --verbose lists them all"
    return None
