"""Known GPUs as data: what their makers say they can, and what share of that this engine reaches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.errors import ConfigError
from tokenmill.plan.solve.hardware import GIB
from tokenmill.plan.solve.roofline import Link, Rates

TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One GPU, in its maker's figures (dense operations, one direction of a link)."""

    name: str
    memory: int  # bytes that a program can have
    bandwidth: float  # bytes/s
    flops: Mapping[str, float]  # by the kind of number that is multiplied: bf16, fp8, int8
    link: Link  # to the others of the same machine
    host: float = 25e9  # bytes/s from pinned memory of the host, of its PCIe slot less what that takes for itself

    @property
    def rounds(self) -> bool:
        """Whether the engine's products of rounded weights run there: Hopper and later (ops/device_facts.py)."""
        return self.name in ("b200", "h200", "h100")


@dataclass(frozen=True)
class Efficiency:
    """Shares of a maker's figures that the engine reaches with one form of weights."""

    math: str  # which operations: bf16, fp8, int8
    weights: float  # of the bandwidth
    linear: float  # of the operations


_NVLINK4 = Link(450e9, 9e-6)
_PCIE4 = Link(26e9, 2.5e-5)
_PCIE5 = 55e9

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "b200",
            178 * GIB,
            8.0 * TERA,
            {"bf16": 2250 * TERA, "fp8": 4500 * TERA, "int8": 4500 * TERA},
            Link(900e9, 9e-6),
            _PCIE5,
        ),
        Gpu(
            "h200",
            139 * GIB,
            4.8 * TERA,
            {"bf16": 989 * TERA, "fp8": 1979 * TERA, "int8": 1979 * TERA},
            _NVLINK4,
            _PCIE5,
        ),
        Gpu(
            "h100",
            79 * GIB,
            3.35 * TERA,
            {"bf16": 989 * TERA, "fp8": 1979 * TERA, "int8": 1979 * TERA},
            _NVLINK4,
            _PCIE5,
        ),
        Gpu("a100", 79 * GIB, 2.04 * TERA, {"bf16": 312 * TERA, "int8": 624 * TERA}, Link(300e9, 1e-5)),
        Gpu("a100-40gb", 39 * GIB, 1.56 * TERA, {"bf16": 312 * TERA, "int8": 624 * TERA}, Link(300e9, 1e-5)),
        Gpu("l40s", 44 * GIB, 0.864 * TERA, {"bf16": 362 * TERA, "fp8": 733 * TERA, "int8": 733 * TERA}, _PCIE4),
        Gpu("l4", 22 * GIB, 0.3 * TERA, {"bf16": 121 * TERA, "fp8": 242 * TERA, "int8": 242 * TERA}, _PCIE4),
        Gpu("a10g", 22 * GIB, 0.6 * TERA, {"bf16": 70 * TERA, "int8": 140 * TERA}, _PCIE4),
        Gpu("rtx4090", 23 * GIB, 1.008 * TERA, {"bf16": 165 * TERA, "fp8": 330 * TERA, "int8": 660 * TERA}, _PCIE4),
    )
}

# Fitted to the 19 workloads of docs/performance.md without a shared prefix, on an H200 (tests/plan/test_plan_h200.py).
EFFICIENCIES = {
    "dense": Efficiency("bf16", weights=0.837, linear=0.771),
    "fp8": Efficiency("fp8", weights=0.784, linear=0.758),
    # Fitted to steps of Llama-3-8B on an H200 (the same test). Weights alone for WEIGHT_ONLY_ROWS at most.
    "int8": Efficiency("bf16", weights=0.75, linear=0.66),
    "int4": Efficiency("bf16", weights=0.67, linear=0.64),
    "w8a8": Efficiency("int8", weights=0.73, linear=0.78),
}
WEIGHT_ONLY_ROWS = 64  # decoding at once; with more, int8 and int4 weights are slower than floats
STACKED_SHARE = 0.644  # of the bf16 operations, products of experts
KV_SHARE = 0.8125  # of the bandwidth, decode attention
ATTENTION_SHARE = 0.566  # of the bf16 operations, attention of chunks
TRAFFIC_SHARE = 0.414  # of the bandwidth, everything between products
LOGIT_BYTES = 16.8  # bytes of bandwidth that sampling one logit comes to
ROW_S, STEP_S, LAYER_S, EAGER_S = 5e-7, 2.7e-5, 2.06e-5, 6.65e-5


def rates_of(gpu: Gpu, form: str) -> Rates:
    """What this engine is expected to reach on the GPU with weights in this form (a key of `EFFICIENCIES`)."""
    share = EFFICIENCIES[form]
    if share.math not in gpu.flops:
        raise ConfigError(f"a {gpu.name} does not multiply {share.math} numbers")
    return Rates(
        weight_bytes=gpu.bandwidth * share.weights,
        kv_bytes=gpu.bandwidth * KV_SHARE,
        linear_flops=gpu.flops[share.math] * share.linear,
        stacked_flops=gpu.flops["bf16"] * STACKED_SHARE,
        attention_flops=gpu.flops["bf16"] * ATTENTION_SHARE,
        traffic_bytes=gpu.bandwidth * TRAFFIC_SHARE,
        logit_s=LOGIT_BYTES / gpu.bandwidth,
        row_s=ROW_S,
        step_s=STEP_S,
        layer_s=LAYER_S,
        eager_s=EAGER_S,
        overlapped=True,
    )


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """From "h200x8" or "l4"."""
    found = re.fullmatch(r"(.+?)(?:x(\d+))?", text.strip().lower())
    name = found[1] if found else text
    if name not in GPUS:
        raise ConfigError(f"--gpu is {text!r}; known are {', '.join(GPUS)}, as in h200x8")
    count = int(found[2] or 1) if found else 1
    if count < 1:
        raise ConfigError(f"--gpu is {text!r}; it takes one GPU at least")
    return GPUS[name], count


def recognize(device_name: str) -> Gpu | None:
    """The known GPU behind a driver's name, such as "NVIDIA H100 80GB HBM3"."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if "4090" in words and "rtx" in words:
        return GPUS["rtx4090"]
    if "a100" in words and "40gb" in words:
        return GPUS["a100-40gb"]
    return next((gpu for name, gpu in GPUS.items() if name in words), None)
