"""Invariant kernels compute what the reference computes, and a query's bits are those it gets alone."""

from dataclasses import replace

import pytest
import torch
from cases import attention_case, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.ops import reference
from tokenmill.ops.types import AttentionBatch, Mask

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory", "fixed_order_of_sums")
# The interpreter's dot takes bfloat16 for integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
MASKS = [Mask(), Mask(window=5), Mask(window=90), Mask(window=40), Mask(softcap=2.0)]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Rows of a few hundred keys have several spans."""
    from tokenmill.ops.triton.attention import invariant as attention_invariant

    monkeypatch.setattr(attention_invariant, "SPAN", 64)


def check(case, dtype=torch.float32) -> None:
    from tokenmill.ops.triton.attention.invariant import attention

    for _layer in range(2):  # the second one finds the work of the first
        got = case.call(attention)
        assert not got.isnan().any()
        torch.testing.assert_close(got, case.call(reference.attention), **tolerance(dtype))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_equals_reference(mask, triton_device):
    check(attention_case([1, 1, 1, 1, 2, 33], [1, 37, 64, 300, 2, 230], mask=mask, device=triton_device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        {"heads": 3, "kv_heads": 3, "key_dim": 64},
        {"heads": 7, "kv_heads": 1, "key_dim": 80},
        {"heads": 2, "kv_heads": 1, "key_dim": 256},
        {"heads": 3, "kv_heads": 1, "key_dim": 24, "value_dim": 12},
        {"heads": 70, "kv_heads": 1, "key_dim": 16, "value_dim": 8, "values_in_keys": True},
    ],
    ids=str,
)
def test_every_head_shape_equals_reference(heads, dtype, triton_device):
    check(attention_case([1, 1, 3], [35, 140, 38], dtype=dtype, device=triton_device, **heads), dtype)


def test_padding_rows_without_keys_get_zeros(triton_device):
    from tokenmill.ops.triton.attention.invariant import attention

    case = attention_case([1, 1], [300, 1], device=triton_device)
    expected = case.call(reference.attention)
    case.batch.context[1] = 0
    got = case.call(attention)
    torch.testing.assert_close(got[0], expected[0], **tolerance(torch.float32))
    assert not got[1].any()


def test_rows_are_cut_only_while_there_is_room(triton_device, monkeypatch):
    """Whether a row is cut or one program does it, the bits are the same."""
    from tokenmill.ops.triton.attention import invariant as attention_invariant
    from tokenmill.ops.triton.config import partial_bytes

    found = []
    for room, waves, cut in ((100, 64, [1, 2, 3]), (8, 64, [1, 2]), (1, 64, []), (100, 2, [2])):
        case = attention_case([1] * 4, [1, 90, 333, 200], device=triton_device)
        workspace = room * partial_bytes(case.q.shape[1], case.q.shape[2])
        monkeypatch.setattr(attention_invariant, "DECODE_WORKSPACE_BYTES", workspace)
        monkeypatch.setattr(attention_invariant, "_WAVES", waves)
        monkeypatch.setattr(attention_invariant, "multiprocessors", lambda device: 3)
        for _layer in range(2):
            found.append(case.call(attention_invariant.attention))
        ((work,),) = case.batch.cache.values()
        of_row = work.items[:, 0].tolist()
        assert [row for row in range(4) if of_row.count(row) > 1] == cut
    assert all(torch.equal(found[0], other) for other in found)


def rearranged(case, parts):
    """The same queries as other rows: each part is (row, first query, count)."""
    batch = case.batch
    first = [sum(batch.host_counts[:row]) for row in range(len(batch.host_counts))]
    order = torch.cat([torch.arange(first[row] + at, first[row] + at + count) for row, at, count in parts])
    rows, counts = [batch.host_rows[row] for row, _, _ in parts], [count for _, _, count in parts]
    contexts = [batch.host_context[row] - batch.host_counts[row] + at + count for row, at, count in parts]
    device = case.q.device
    made = AttentionBatch(
        rows=torch.tensor(rows, dtype=torch.int32, device=device),
        q_start=torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32),
        context=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=batch.block_tables,
        num_singles=sum(count == 1 for count in counts),
        max_query=max(counts),
        max_context=max(contexts),
        host_rows=rows,
        host_counts=counts,
        host_context=contexts,
    )
    return replace(case, q=case.q[order.to(device)].contiguous(), batch=made), order


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 150)),
    group=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_chunks_and_rows(cuts, window, group, seed, triton_device):
    """In float32 tiles of decodes and chunks are alike, so that the interpreter can tell."""
    from tokenmill.ops.triton.attention.invariant import attention

    case = attention_case(
        [20, 13], [150, 70], heads=2 * group, kv_heads=2, mask=Mask(window=window), seed=seed, device=triton_device
    )
    whole = case.call(attention)
    parts = []
    for row, count in enumerate(case.batch.host_counts):
        at, turn = 0, 0
        while at < count:
            size = min(cuts[turn % len(cuts)], count - at)
            parts.append((row, at, size))
            at, turn = at + size, turn + 1
    parts.sort(key=lambda part: part[2] > 1)
    for some in (parts, parts[:1], parts[-1:]):
        other, order = rearranged(case, some)
        assert torch.equal(other.call(attention), whole[order.to(whole.device)])


SIZES = [(1, 70, 192), (3, 128, 104), (17, 65, 200), (70, 64, 64), (150, 136, 64), (300, 64, 40)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_equal_plain_torch(size, dtype, triton_device):
    from tokenmill.ops.triton.gemm.invariant import Shape, invariant_gemm

    rows, columns, inner = size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner + 8, generator=generator).to(triton_device, dtype)[:, :inner]
    weight = torch.randn(columns, inner, generator=generator).to(triton_device, dtype)
    bias = torch.randn(columns, generator=generator).to(triton_device, dtype)
    expected = x.double() @ weight.double().T
    for shape in (None, Shape(64, 64, 64, 4, 2, rows_left=True), Shape(16, 64, 32, 4, 2, group=2)):
        for with_bias in (None, bias):
            exact = expected if with_bias is None else expected + with_bias.double()
            got = invariant_gemm(x, weight, with_bias, shape=shape)
            assert ((got.double() - exact).abs().max() / exact.abs().max()) < 4 * torch.finfo(dtype).eps
            wide = invariant_gemm(x, weight, with_bias, shape=shape, dtype=torch.float32)
            assert ((wide.double() - exact).abs().max() / exact.abs().max()) < 1e-5
            assert torch.equal(wide.to(dtype), got)


def test_rows_that_are_not_aligned_are_copied(triton_device):
    from tokenmill.ops.triton.gemm.invariant import invariant_gemm

    x = torch.randn(5, 41, device=triton_device)[:, 1:]
    weight = torch.randn(64, 40, device=triton_device)
    torch.testing.assert_close(invariant_gemm(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)
    assert invariant_gemm(x[:0], weight).shape == (0, 64)


@pytest.mark.parametrize("tokens,k", [(1, 1), (1, 3), (5, 2), (45, 4)])
def test_mixtures_equal_reference(tokens, k, triton_device):
    from tokenmill.ops.triton.moe.invariant import moe, route

    generator = torch.Generator().manual_seed(0)
    experts, hidden, inner = 6, 48, 40

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(triton_device) * shape[-1] ** -0.5

    x, router = randn(tokens, hidden) * 7, randn(experts, hidden)
    gate_up, down = randn(experts, 2 * inner, hidden), randn(experts, hidden, inner)
    weights, chosen = route(x, router, k, True, 1.5)
    probs, expected = (x @ router.T).softmax(-1).topk(k)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, 1.5 * probs / probs.sum(-1, keepdim=True))
    got = moe(x, weights, chosen, gate_up, down, "silu")
    torch.testing.assert_close(got, reference.moe(x, weights, chosen, gate_up, down, "silu"), rtol=1e-4, atol=1e-4)
    one = tokens // 2
    alone = moe(x[one : one + 1], weights[one : one + 1], chosen[one : one + 1], gate_up, down, "silu")
    torch.testing.assert_close(alone[0], got[one], rtol=1e-5, atol=1e-5)


def test_a_gpu_gets_invariant_kernels_only_when_asked(triton_device):
    from tokenmill.ops.registry import Need, select

    need = Need("cuda", torch.bfloat16, head_dim=128)
    plain, asked = select(need).chosen, select(replace(need, batch_invariant=True)).chosen
    assert all(one.name != "invariant" for one in plain.values())
    assert {op for op, one in asked.items() if one.name == "invariant"} == {"attention", "moe", "route"}
    assert all(one.batch_invariant and one.capture_safe for one in asked.values())
    with pytest.raises(ConfigError, match=r"no op 'attention' for what was asked: .*invariant: no float64"):
        select(Need("cuda", torch.float64, batch_invariant=True))
