"""Triton kernels; importing this package needs triton, so the registry does it only where they may be used."""

from tokenmill.ops.registry import Implementation
from tokenmill.ops.triton import activation, attention, logprobs, moe, moe_route, norm, rope, sample, shape
from tokenmill.ops.triton.gemm import quantize

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *norm.IMPLEMENTATIONS,
    *quantize.IMPLEMENTATIONS,
    *rope.IMPLEMENTATIONS,
    *attention.IMPLEMENTATIONS,
    *activation.IMPLEMENTATIONS,
    *moe_route.IMPLEMENTATIONS,
    *moe.IMPLEMENTATIONS,
    *sample.IMPLEMENTATIONS,
    *logprobs.IMPLEMENTATIONS,
    *shape.IMPLEMENTATIONS,
)
