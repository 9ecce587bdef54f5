"""Long chunks, whose keys are gathered first, get what the reference computes, beside rows that are not gathered."""

import pytest
import torch
from cases import attention_case, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.ops import reference
from tokenmill.ops.types import Mask

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
HALF = torch.float16


@pytest.fixture(autouse=True)
def small_rules(monkeypatch):
    """Chunks of 16 pairs count as long, and tiles are small enough for short rows to have several."""
    from tokenmill.ops.triton.attention import fresh as attention_fresh
    from tokenmill.ops.triton.config import Tile

    monkeypatch.setattr(attention_fresh, "LEAST_PAIRS", 16)
    monkeypatch.setattr(attention_fresh, "_GATHER", 32)
    shape = attention_fresh.Launch(Tile(32, 32, 4, 2))
    monkeypatch.setattr(attention_fresh, "launch_shape", lambda dim, device: shape)


def gathered_rows(case) -> set[int]:
    plans = [plan for name, plan in case.batch.cache.items() if name.startswith("fresh plan")]
    return set(plans[0].members) if plans and plans[0] else set()


def check(case, members: set[int] | None = None, dtype=HALF) -> None:
    from tokenmill.ops.triton.attention.paged import attention

    got = case.call(attention)
    assert members is None or gathered_rows(case) == members
    assert not got.isnan().any()
    torch.testing.assert_close(got, case.call(reference.attention), **tolerance(dtype))


@pytest.mark.parametrize("mask", [Mask(), Mask(window=5), Mask(window=40), Mask(window=33, softcap=20.0)], ids=str)
def test_long_chunks_equal_reference(mask, triton_device):
    check(attention_case([40, 70], [40, 130], mask=mask, dtype=HALF, device=triton_device), {0, 1})


def test_singles_short_and_long_chunks_equal_reference(triton_device):
    counts, contexts = [1, 1, 5, 33, 8, 7], [70, 1, 66, 33, 75, 7]
    check(attention_case(counts, contexts, shared=2, dtype=HALF, device=triton_device), {3, 4})


HEADS = [
    {"heads": 3, "kv_heads": 3, "key_dim": 64},
    {"heads": 7, "kv_heads": 1, "key_dim": 80},
    {"heads": 4, "kv_heads": 2, "key_dim": 96, "block_size": 24},
    {"heads": 2, "kv_heads": 1, "key_dim": 256},
    {"heads": 2, "kv_heads": 2, "key_dim": 8},
]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_shape_equals_reference(heads, triton_device):
    check(attention_case([20, 17], [35, 17], dtype=HALF, device=triton_device, **heads), {0, 1})


def test_rows_beyond_the_scratch_are_read_from_the_cache(triton_device, monkeypatch):
    from tokenmill.ops.triton.attention import fresh as attention_fresh

    case = attention_case([20, 40, 30], [20, 90, 30], dtype=HALF, device=triton_device)
    monkeypatch.setattr(attention_fresh, "SCRATCH_BYTES", 2 * 2 * 16 * 2 * 64)  # 64 keys, in whole tiles
    check(case, {0, 2})


def test_wide_dtypes_are_read_from_the_cache(triton_device):
    check(attention_case([40], [90], device=triton_device), set(), torch.float32)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block_n", [64, 128])
def test_hopper_kernel_equals_reference(dim, block_n, triton_device, monkeypatch):
    from tokenmill.ops.device_facts import HOPPER_ATTENTION, usable
    from tokenmill.ops.triton.attention import fresh as attention_fresh
    from tokenmill.ops.triton.config import Tile

    if not usable(HOPPER_ATTENTION, torch.device(triton_device)):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(attention_fresh, "_GATHER", 64)
    shape = attention_fresh.Launch(Tile(128, block_n, 4, 2), hopper=True)
    monkeypatch.setattr(attention_fresh, "launch_shape", lambda dim, device: shape)
    for group in (1, 4, 7):
        case = attention_case(
            [1, 300, 20, 129], [50, 300, 500, 400], heads=2 * group, key_dim=dim, dtype=HALF, device=triton_device
        )
        check(case, {1, 2, 3})


def test_lists_cover_every_query_and_key_once_and_start_with_the_longest():
    from tokenmill.ops.triton.attention.fresh import _host_lists
    from tokenmill.ops.triton.config import Tile

    batch = attention_case([1, 5, 64, 130], [9, 200, 64, 131]).batch
    gather, tiles = _host_lists(batch, [2, 3], [0, 64], 3, Tile(16, 64, 4, 2))
    assert tiles[0, :5].tolist() == [70, 130, 1, 384, 64]
    assert sorted(tiles[:, [0, 3]].tolist()) == [
        [first, 16 * n] for first, pairs in ((6, 64 * 3), (70, 130 * 3)) for n in range(-(-pairs // 16))
    ]
    assert sorted(gather[:, 2].tolist()) == list(range(0, 64 + 192, 32))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60)), min_size=1, max_size=3),
    block_size=st.sampled_from([8, 16, 32]),
    group=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 70)),
    seed=st.integers(0, 1000),
)
def test_random_mixes_equal_reference(rows, block_size, group, window, seed, triton_device):
    rows = sorted(rows, key=lambda row: row[0] > 1)
    counts, contexts = [count for count, _ in rows], [count + before for count, before in rows]
    case = attention_case(
        counts, contexts, heads=2 * group, kv_heads=2, block_size=block_size, shared=1,
        mask=Mask(window=window), dtype=HALF, seed=seed, device=triton_device,
    )  # fmt: skip
    check(case)
