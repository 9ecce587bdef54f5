"""Products of heads with matrices of their own, against torch's."""

from __future__ import annotations

import pytest
import torch

from tokenmill.ops import reference
from tokenmill.ops.native import library
from tokenmill.ops.native.elementwise import concat
from tokenmill.ops.native.heads import per_head


@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("columns", "rows"), [(12, 24), (128, 512), (37, 83)])
def test_heads_are_multiplied_as_by_torch(level: int, tokens: int, transposed: bool, columns: int, rows: int) -> None:
    made = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, 3, columns + 20, generator=made)
    beside, x = wide[..., :8], wide[..., 20:]
    weight = torch.randn(3, *((columns, rows) if transposed else (rows, columns)), generator=made)
    for given in (None, beside):
        found = per_head(x, weight, transposed, given)
        torch.testing.assert_close(found, reference.per_head(x, weight, transposed, given), atol=1e-4, rtol=1e-4)
        for row in range(tokens):
            alone = per_head(x[row : row + 1], weight, transposed, None if given is None else given[row : row + 1])
            assert torch.equal(alone[0], found[row])


def test_two_parts_of_rows_are_joined(native: library.Library) -> None:
    wide = torch.randn(5, 40)
    assert torch.equal(concat(wide[:, 3:10], wide[:, 20:]), reference.concat(wide[:, 3:10], wide[:, 20:]))
