"""Small functions that several kernels share and that Triton's language does not have."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    # exp overflows to infinity and underflows to zero, and both give the right limit.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activate(gate, SILU: tl.constexpr):
    """SiLU, or GELU in its tanh form."""
    if SILU:
        return gate / (1.0 + tl.exp(-gate))
    else:
        return 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def key_of(value):
    """An int64 that orders as the float32 does, with one key per float."""
    bits = tl.cast(value, tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 with this key."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mix(x):
    """The bits of tokenmill.ops.noise.mix, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_key(seed, position):
    """The bits of tokenmill.ops.noise.key."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    return mix(mix(mix(low) ^ high) ^ position.to(tl.uint32))


@triton.jit
def gumbel(key, token):
    """tokenmill.ops.noise.gumbel_noise for one row's key: the same bits, so the same noise up to the logarithm."""
    bits = mix(key ^ mix(token.to(tl.uint32) + 0x9E3779B9))
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(tl.maximum(uniform, 1.1641532182693481e-10), 0.99999994039535522)
    return -tl.log(-tl.log(uniform))
