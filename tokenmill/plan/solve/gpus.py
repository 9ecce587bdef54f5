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
    """One GPU, in its maker's figures (dense operations that add up in float32, one direction of a link)."""

    name: str
    memory: int  # bytes that a program can have
    bandwidth: float  # bytes/s
    flops: Mapping[str, float]  # by the kind of number that is multiplied: bf16, fp8, int8
    link: Link  # to the others of the same machine
    capability: tuple[int, int]  # CUDA's, which says what instructions there are
    multiprocessors: int
    shared: int  # bytes of shared memory that one program may have
    host: float  # bytes/s from pinned memory of the host, of its PCIe slot less what that takes for itself
    words: tuple[str, ...] = ()  # all of them are in what the driver calls it; none: its name is

    def computes(self, form: str) -> bool:
        """Whether the engine has kernels for weights or KV in this form there (the rules of ops/device_facts.py)."""
        return self.capability >= ((8, 9) if form == "fp8" else (8, 0))


@dataclass(frozen=True)
class Efficiency:
    """Shares of a maker's figures that the engine reaches with one form of weights."""

    math: str  # which operations: bf16, fp8, int8
    weights: float  # of the bandwidth
    linear: float  # of the operations


_NVLINK3, _NVLINK4, _NVLINK5 = Link(300e9, 1e-5), Link(450e9, 9e-6), Link(900e9, 9e-6)
_PCIE4, _PCIE5 = Link(26e9, 2.5e-5), Link(52e9, 2.5e-5)
_AMPERE, _SMALL_AMPERE, _ADA, _HOPPER = (8, 0), (8, 6), (8, 9), (9, 0)
_BLACKWELL, _SMALL_BLACKWELL = (10, 0), (12, 0)
_SHARED = {  # by compute capability, as CUDA's guide has it
    _AMPERE: 163 << 10, _SMALL_AMPERE: 99 << 10, _ADA: 99 << 10, _HOPPER: 227 << 10,
    _BLACKWELL: 227 << 10, _SMALL_BLACKWELL: 99 << 10,
}  # fmt: skip


def _gpu(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    gib: int,
    tera_bytes: float,
    tera_flops: Mapping[str, float],
    link: Link,
    words: str = "",
) -> Gpu:
    flops = {kind: number * TERA for kind, number in tera_flops.items()}
    shared, host = _SHARED[capability], 55e9 if capability >= _HOPPER else 25e9  # PCIe 5, or 4
    return Gpu(
        name, gib * GIB, tera_bytes * TERA, flops, link, capability, multiprocessors, shared, host, tuple(words.split())
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", _BLACKWELL, 148, 178, 8.0, {"bf16": 2250, "fp8": 4500, "int8": 4500}, _NVLINK5),
        _gpu("h200", _HOPPER, 132, 139, 4.8, {"bf16": 989, "fp8": 1979, "int8": 1979}, _NVLINK4),
        _gpu("h100", _HOPPER, 132, 79, 3.35, {"bf16": 989, "fp8": 1979, "int8": 1979}, _NVLINK4),
        _gpu("h20", _HOPPER, 78, 95, 4.0, {"bf16": 148, "fp8": 296, "int8": 296}, _NVLINK4),
        _gpu("a100", _AMPERE, 108, 79, 2.04, {"bf16": 312, "int8": 624}, _NVLINK3),
        _gpu("a100-40gb", _AMPERE, 108, 39, 1.56, {"bf16": 312, "int8": 624}, _NVLINK3, "a100 40gb"),
        _gpu("l40s", _ADA, 142, 44, 0.864, {"bf16": 362, "fp8": 733, "int8": 733}, _PCIE4),
        _gpu("l4", _ADA, 58, 22, 0.3, {"bf16": 121, "fp8": 242, "int8": 242}, _PCIE4),
        _gpu("a10g", _SMALL_AMPERE, 80, 22, 0.6, {"bf16": 70, "int8": 140}, _PCIE4),
        _gpu("a10", _SMALL_AMPERE, 72, 22, 0.6, {"bf16": 125, "int8": 250}, _PCIE4),
        _gpu("a40", _SMALL_AMPERE, 84, 44, 0.696, {"bf16": 150, "int8": 299}, _PCIE4),
        _gpu("a6000", _SMALL_AMPERE, 84, 47, 0.768, {"bf16": 155, "int8": 310}, _PCIE4),
        _gpu("rtx3090", _SMALL_AMPERE, 82, 23, 0.936, {"bf16": 71, "int8": 284}, _PCIE4, "rtx 3090"),
        _gpu("rtx4090", _ADA, 128, 23, 1.008, {"bf16": 165, "fp8": 330, "int8": 660}, _PCIE4, "rtx 4090"),
        _gpu("rtx5090", _SMALL_BLACKWELL, 170, 31, 1.792, {"bf16": 209, "fp8": 419, "int8": 838}, _PCIE5, "rtx 5090"),
        _gpu(
            "rtxpro6000", _SMALL_BLACKWELL, 188, 94, 1.792, {"bf16": 503, "fp8": 1007, "int8": 1007}, _PCIE5,
            "rtx pro 6000",
        ),
    )
}  # fmt: skip

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
    told = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    fitting = [gpu for gpu in GPUS.values() if told.issuperset(gpu.words or (gpu.name,))]
    return max(fitting, key=lambda gpu: len(gpu.words), default=None)
