"""Which releases of Triton and which GPUs kernels are made for: declared here, asked where they are chosen, printed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

Version = tuple[int, int]  # of Triton: the release; of a GPU: its compute capability


@dataclass(frozen=True)
class Family:
    """Kernels, or a way to launch them, that not every release of Triton and not every GPU can have."""

    name: str
    instead: str  # what is done where it cannot be used
    releases: tuple[Version, Version] | None = None  # first and last that it was tried with; None: any
    gpus: tuple[Version, Version] | None = None  # None: any
    gpu_name: str = ""


# Every kernel compiles with these for Hopper (scripts/compile_kernels.py). Gluon, the language of the Hopper kernels,
# still changes: what was renamed is in gluon_names.py. A later release may work, but nobody has tried it.
_KNOWN = ((3, 6), (3, 9))
_HOPPER = ((9, 0), (9, 99))
_HOPPER_OR_LATER = ((9, 0), (99, 99))

ATTENTION = Family("warp-specialised attention", "long chunks take the plain kernel", _KNOWN, _HOPPER, "a Hopper GPU")
MOE = Family("warp-specialised MoE", "experts take the plain grouped products", _KNOWN, _HOPPER, "a Hopper GPU")
EIGHT_BITS = Family(
    "warp-specialised products of eight bits", "large ones take the small tiles or the library", _KNOWN, _HOPPER,
    "a Hopper GPU",
)  # fmt: skip
ONE_ROW = Family("one-row int4 products", "one request takes those of few rows", _KNOWN, _HOPPER, "a Hopper GPU")
# How a compiled kernel is launched directly, the same in these releases:
# run(grid x, y, z, stream, function, packed metadata, launch metadata, enter hook, exit hook, *all arguments in order).
QUICK_LAUNCH = Family("quick launches", "kernels are launched by Triton, which takes the host longer", _KNOWN)
PDL = Family(
    "programmatic dependent launch", "kernels wait for the one before to end", None, _HOPPER_OR_LATER,
    "a Hopper GPU or a later one",
)  # fmt: skip

HOPPER_FAMILIES = (ATTENTION, MOE, EIGHT_BITS, ONE_ROW)
FAMILIES = (*HOPPER_FAMILIES, QUICK_LAUNCH, PDL)


def release() -> Version:
    """Of the Triton that is installed."""
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def misfit(family: Family, device: torch.device) -> str:
    """Why these cannot be used; empty where they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    return release_misfit(family) or _gpu_misfit(family, device)


def release_misfit(family: Family) -> str:
    if family.releases is None or family.releases[0] <= release() <= family.releases[1]:
        return ""
    first, last = ("{}.{}".format(*version) for version in family.releases)
    return f"needs Triton {first} to {last} and this is {triton.__version__}"


def _gpu_misfit(family: Family, device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if family.gpus is None or family.gpus[0] <= capability <= family.gpus[1]:
        return ""
    return f"needs {family.gpu_name} and this has compute capability {'.'.join(map(str, capability))}"


def outdated(device: torch.device) -> str | None:
    """What this GPU could run with another release of Triton, in a sentence for who has not asked."""
    for family in HOPPER_FAMILIES:
        if (reason := release_misfit(family)) and not _gpu_misfit(family, device):
            return f"some of the fastest GPU kernels are not used: {family.name} {reason}; --verbose lists them all"
    return None


@lru_cache
def usable(family: Family, device: torch.device) -> bool:
    return not misfit(family, device)


def passed_over(families: Iterable[Family], device: torch.device) -> list[str]:
    """A sentence for each of these that cannot be used: why, and what is done instead."""
    told = ((family, misfit(family, device)) for family in families)
    return [f"{family.name}: {reason}; {family.instead}" for family, reason in told if reason]
