"""Triton kernels; importing this package needs triton, so the registry does it only where they may be used."""

from tokenmill.ops.registry import Implementation
from tokenmill.ops.triton import activation, norm, rope
from tokenmill.ops.triton.attention import paged
from tokenmill.ops.triton.gemm import quantize
from tokenmill.ops.triton.moe import experts, route
from tokenmill.ops.triton.sample import logprobs, sampler, shape

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *norm.IMPLEMENTATIONS,
    *quantize.IMPLEMENTATIONS,
    *rope.IMPLEMENTATIONS,
    *paged.IMPLEMENTATIONS,
    *activation.IMPLEMENTATIONS,
    *route.IMPLEMENTATIONS,
    *experts.IMPLEMENTATIONS,
    *sampler.IMPLEMENTATIONS,
    *logprobs.IMPLEMENTATIONS,
    *shape.IMPLEMENTATIONS,
)
