"""Small functions that several kernels share and that Triton's language does not have."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    # exp overflows to infinity and underflows to zero, and both give the right limit.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
