"""Triton kernels; importing this package needs triton, so the registry does it only where they may be used."""

from tokenmill.ops.registry import Implementation
from tokenmill.ops.triton import activation, decode_step, draft_head, draft_tree, low_rank, norm, place, rope, tree_step
from tokenmill.ops.triton.attention import paged
from tokenmill.ops.triton.gemm import quantize
from tokenmill.ops.triton.moe import codes, experts, route
from tokenmill.ops.triton.sample import logprobs, sampler, shape

_MODULES = (
    norm, quantize, rope, paged, activation, route, experts, codes, sampler, logprobs, shape, decode_step, draft_head,
    tree_step, draft_tree, low_rank, place,
)  # fmt: skip
IMPLEMENTATIONS: tuple[Implementation, ...] = tuple(one for module in _MODULES for one in module.IMPLEMENTATIONS)
