"""A shared beginning that is read once for all its rows gives the result that each row would get by itself."""

import pytest
import torch
from cases import AttentionCase, attention_case, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.ops import cpu, reference
from tokenmill.ops.types import Mask

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")


def share(case: AttentionCase, tokens: int, members: list[int], padding: int = 0) -> AttentionCase:
    """Tell the attention op that these rows begin with the same `tokens` tokens."""
    batch = case.batch
    device = batch.rows.device
    lengths = torch.zeros(len(batch.host_rows), dtype=torch.int32)
    lengths[members] = tokens
    batch.shared_tokens = lengths.to(device)
    batch.shared_members = torch.tensor(members + [-1] * padding, dtype=torch.int32, device=device)
    tables = batch.block_tables[batch.rows[members].long(), : tokens // case.k_cache.shape[1]]
    assert (tables == tables[0]).all(), "the case itself is wrong"
    return case


def check(case: AttentionCase, dtype: torch.dtype = torch.float32) -> None:
    from tokenmill.ops.triton.attention.paged import attention

    for _layer in range(2):
        got = case.call(attention)
        assert not got.isnan().any()
        torch.testing.assert_close(got, case.call(reference.attention), **tolerance(dtype))


CONTEXTS = [97, 81, 130, 400, 88, 300]


@pytest.mark.parametrize("mask", [Mask(), Mask(softcap=2.0), Mask(window=30)], ids=str)
@pytest.mark.parametrize("members", [[0, 1, 2, 3, 4, 5], [1, 3, 4], [5, 2]], ids=str)
def test_members_and_others_equal_reference(members, mask, triton_device):
    check(share(attention_case([1] * 6, CONTEXTS, shared=10, mask=mask, device=triton_device), 80, members))


def test_chunks_beside_a_shared_prefix_equal_reference(triton_device):
    check(share(attention_case([1, 1, 1, 7], [90, 85, 150, 99], shared=10, device=triton_device), 72, [0, 2]))


@pytest.mark.parametrize("in_place", [0, 1 << 20])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_cut_of_the_prefix_equals_reference(splits, in_place, triton_device, monkeypatch):
    from tokenmill.ops.triton.attention import decode as attention_decode

    monkeypatch.setattr(attention_decode, "prefix_splits", lambda *_: splits)
    monkeypatch.setattr(attention_decode, "_JOIN_IN_PLACE", in_place)
    check(share(attention_case([1] * 6, CONTEXTS, shared=10, device=triton_device), 80, [4, 0, 3, 1], padding=2))


HEADS = [
    {"heads": 7, "kv_heads": 1, "key_dim": 80},
    {"heads": 4, "kv_heads": 2, "key_dim": 96},
    {"heads": 3, "kv_heads": 1, "key_dim": 24, "value_dim": 12},
    {"heads": 5, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "values_in_keys": True},
    {"heads": 70, "kv_heads": 1, "key_dim": 16, "value_dim": 8, "values_in_keys": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_shape_equals_reference(heads, dtype, triton_device):
    case = attention_case([1] * 3, [45, 43, 60], shared=5, dtype=dtype, device=triton_device, **heads)
    check(share(case, 40, [0, 1, 2]), dtype)


def test_the_prefix_is_read_through_the_first_member_only(triton_device):
    """What the other members' tables say about the shared positions is never looked at: it is read once."""
    case = share(attention_case([1] * 3, [95, 85, 130], shared=10, device=triton_device), 80, [2, 0, 1])
    expected = case.call(reference.attention)
    for index in (0, 1):
        case.batch.block_tables[case.batch.host_rows[index], :10] = 2**30
    from tokenmill.ops.triton.attention.paged import attention

    torch.testing.assert_close(case.call(attention), expected, **tolerance(torch.float32))


def test_recorded_padding_rows_beside_members_get_zeros(triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([1] * 4, [95, 85, 130, 1], shared=10, device=triton_device)
    expected = case.call(reference.attention)
    case.batch.context[3] = 0
    got = share(case, 80, [0, 1, 2], padding=1).call(attention)
    torch.testing.assert_close(got[:3], expected[:3], **tolerance(torch.float32))
    assert not got[3].any()


def test_other_implementations_ignore_it():
    case = attention_case([1] * 3, [95, 85, 130], shared=10)
    expected = case.call(reference.attention)
    share(case, 80, [0, 1, 2])
    assert torch.equal(case.call(reference.attention), expected)
    torch.testing.assert_close(case.call(cpu.attention), expected, **tolerance(torch.float32))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    own=st.lists(st.integers(1, 150), min_size=2, max_size=6),
    blocks=st.integers(1, 12),
    used=st.integers(1, 12),
    block_size=st.sampled_from([8, 16]),
    group=st.integers(1, 5),
    data=st.data(),
)
def test_random_mixes_equal_reference(own, blocks, used, block_size, group, data, triton_device):
    contexts = [blocks * block_size + tokens for tokens in own]
    members = data.draw(st.lists(st.integers(0, len(own) - 1), min_size=1, unique=True))
    case = attention_case(
        [1] * len(own), contexts, heads=2 * group, kv_heads=2, block_size=block_size, shared=blocks,
        seed=data.draw(st.integers(0, 1000)), device=triton_device,
    )  # fmt: skip
    check(share(case, min(used, blocks) * block_size, members, padding=len(own) - len(members)))
