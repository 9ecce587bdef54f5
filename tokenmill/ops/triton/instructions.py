"""Instructions in text, as the GPU that is compiled for has them: some on pairs of bfloat16 came with Hopper."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
from triton.language.target_info import cuda_capability_geq


@triton.constexpr_function
def before_hopper(text):
    """The same by multiply-adds, which older GPUs have too. They round once as well, so every bit is the same."""
    lines = []
    for line in text.split("\n"):
        name, _, operands = line.strip().partition(" ")
        if name == "sub.bf16x2":
            out, a, b = operands.rstrip(";").split(", ")
            lines.append(f"fma.rn.bf16x2 {out}, {b}, minus_one, {a};")
        elif name == "mul.bf16x2":
            lines.append(f"fma.rn.bf16x2 {operands.rstrip(';')}, minus_nought;")
        else:
            lines.append(line)
    constants = "{\n.reg .b32 minus_one, minus_nought;\n"
    constants += "mov.b32 minus_one, 0xBF80BF80;\nmov.b32 minus_nought, 0x80008000;\n"
    return constants + "\n".join(lines) + "\n}"


@triton.constexpr_function
def for_target(text):
    """As the GPU takes it that a kernel is being compiled for."""
    return text if cuda_capability_geq(9, 0) else before_hopper(text)
