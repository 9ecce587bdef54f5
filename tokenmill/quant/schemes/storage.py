"""What every scheme says of itself unless it knows better, and the split-K counters beside a weight."""

from __future__ import annotations

import torch

from tokenmill.ops.matmul import MatmulNeed, counters_of
from tokenmill.ops.types import Storage


class SchemeDefaults:
    """The answers of a scheme with nothing special about it: see QuantScheme."""

    floats = False
    stores_embeddings = False
    as_in_file = False
    in_one_part = False
    kv_dtype: torch.dtype | None = None

    def input_bytes(self, columns: int) -> int:
        return 0

    def scratch_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return 0


def counters_beside(need: MatmulNeed) -> Storage:
    """Counters for sums that are computed in parts (split-K), where a kernel does so; all zero between products."""
    count = counters_of(need)
    return {"counters": torch.zeros(count, dtype=torch.int32, device=need.device)} if count else {}
