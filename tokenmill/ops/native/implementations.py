"""What the native library's ops can do. Importing this loads the library, and builds it where it is not there yet."""

from __future__ import annotations

import torch

from tokenmill.ops.native import elementwise, experts, heads, library, low_rank, ops
from tokenmill.ops.registry import Implementation

MAX_HEAD_DIM = 1024


def _implementations() -> tuple[Implementation, ...]:
    """None where the library can be neither found nor built. Its threads are as many as torch would use."""
    native = library.load()
    if isinstance(native, str):
        return ()
    native.threads = torch.get_num_threads()
    return tuple(
        Implementation(
            op=fn.__name__,
            name="native",
            fn=fn,
            devices=("cpu",),
            dtypes=(torch.float32,),
            head_dims=(1, MAX_HEAD_DIM),
            capture_safe=True,
            batch_invariant=True,
            kv_forms=("int8",),
            groups=fn is experts.route,
            optional=fn in (experts.route, experts.moe_packed, heads.per_head, low_rank.add_low_rank),
            rank=10,
        )
        for fn in (
            *(experts.route, experts.moe_packed, heads.per_head, elementwise.concat),
            *(ops.rms_norm, ops.add_rms_norm, ops.rope_kv_write, ops.rope, ops.attention, ops.sample),
            *(elementwise.act_mul, elementwise.add, elementwise.scaled, elementwise.soft_cap),
            low_rank.add_low_rank,
        )
    )


IMPLEMENTATIONS = _implementations()
