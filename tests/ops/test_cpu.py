"""The CPU ops compute what the reference computes, on ragged paged batches with poison in every unused slot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.ops import cpu, reference
from tokenmill.ops.types import AttentionBatch, Mask, SampleBatch

NAN = float("nan")


def paged_batch(lengths, counts, block_size, heads, kv_heads, dim, v_dim, dtype, seed, shared_blocks=0):
    """Rows with the given contexts and query counts, in shuffled blocks; slots that no row uses hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needs) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    keys = torch.full((num_blocks, block_size, kv_heads, dim), NAN, dtype=dtype)
    values = torch.full((num_blocks, block_size, kv_heads, v_dim), NAN, dtype=dtype)
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].tolist()
    tables = torch.full((len(lengths) + 2, max(needs) + 2), num_blocks + 1000, dtype=torch.int32)
    first_blocks: list[int] = []
    for row, length, need in zip(rows, lengths, needs, strict=True):
        mine = [order.pop() for _ in range(need)]
        shared = min(shared_blocks, need, len(first_blocks))
        mine[:shared] = first_blocks[:shared]
        first_blocks = first_blocks or mine
        tables[row, :need] = torch.tensor(mine, dtype=torch.int32)
        for position in range(length):
            block, offset = mine[position // block_size], position % block_size
            keys[block, offset] = torch.randn(kv_heads, dim, generator=generator, dtype=torch.float64).to(dtype)
            values[block, offset] = torch.randn(kv_heads, v_dim, generator=generator, dtype=torch.float64).to(dtype)
    q = torch.randn(sum(counts), heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0)
    batch = AttentionBatch(
        rows=torch.tensor(rows, dtype=torch.int32),
        q_start=starts.int(),
        context=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        num_singles=next((i for i, count in enumerate(counts) if count > 1), len(counts)),
        max_query=max(counts),
        max_context=max(lengths),
        host_rows=rows,
        host_counts=list(counts),
        host_context=list(lengths),
    )
    return q, keys, values, batch


@st.composite
def cases(draw):
    singles = draw(st.lists(st.integers(1, 90), max_size=7))
    chunks = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), max_size=3))
    if not singles and not chunks:
        singles = [1]
    lengths = singles + [start + count for start, count in chunks]
    counts = [1] * len(singles) + [count for _, count in chunks]
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    dim = draw(st.sampled_from([4, 8]))
    shape = {
        "block_size": draw(st.sampled_from([1, 4, 16])),
        "heads": kv_heads * draw(st.sampled_from([1, 3])),
        "kv_heads": kv_heads,
        "dim": dim,
        "v_dim": draw(st.sampled_from([dim, dim, 2])),
    }
    window = draw(st.sampled_from([None, 1, 5, 32, 200]))
    mask = Mask(
        window=window,
        softcap=draw(st.sampled_from([None, None, 2.0])),
    )
    return lengths, counts, shape, mask, draw(st.integers(0, 1 << 30)), draw(st.integers(0, 2))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_attention_equals_reference_on_ragged_batches(case):
    lengths, counts, shape, mask, seed, shared = case
    q, keys, values, batch = paged_batch(lengths, counts, **shape, dtype=torch.float64, seed=seed, shared_blocks=shared)
    expected = reference.attention(q, keys, values, batch, mask, 0.3)
    assert not expected.isnan().any()
    for _ in range(2):  # the second layer of a step finds what the first one derived
        torch.testing.assert_close(cpu.attention(q, keys, values, batch, mask, 0.3), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), window=st.sampled_from([None, 3, 12]))
def test_tree_attention_equals_reference(seed, window):
    counts, lengths = [1, 4, 6], [9, 20, 6]
    q, keys, values, batch = paged_batch(
        lengths, counts, block_size=4, heads=4, kv_heads=2, dim=8, v_dim=8, dtype=torch.float64, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    tree = torch.rand(sum(counts), max(counts), generator=generator) < 0.4
    for first, count in ((0, 1), (1, 4), (5, 6)):
        tree[first : first + count, :count] &= torch.ones(count, count, dtype=torch.bool).tril()
        tree[first : first + count, :count] |= torch.eye(count, dtype=torch.bool)
    batch.tree = tree
    mask = Mask(window=window)
    torch.testing.assert_close(
        cpu.attention(q, keys, values, batch, mask, 0.3), reference.attention(q, keys, values, batch, mask, 0.3)
    )


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_in_each_precision(dtype, tolerance, softcap):
    lengths, counts = [700, 3, 650, 120, 400], [1, 1, 1, 1, 300]
    q, keys, values, batch = paged_batch(
        lengths, counts, block_size=16, heads=6, kv_heads=2, dim=16, v_dim=16, dtype=dtype, seed=3
    )
    mask = Mask(softcap=softcap)
    exact = reference.attention(q.double(), keys.double(), values.double(), batch, mask, 0.25)
    found = cpu.attention(q, keys, values, batch, mask, 0.25)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def test_attention_reads_values_that_are_a_view_of_the_keys():
    q, keys, _, batch = paged_batch(
        [30, 7, 40], [1, 1, 9], block_size=8, heads=4, kv_heads=1, dim=12, v_dim=12, dtype=torch.float64, seed=1
    )
    values = keys[..., :8]
    expected = reference.attention(q, keys, values, batch, Mask(), 0.2)
    torch.testing.assert_close(cpu.attention(q, keys, values, batch, Mask(), 0.2), expected)


def test_groups_of_rows_stay_within_the_memory_budget():
    lengths = [1000, 990, 980, 10, 12, 500, 3]
    groups = list(cpu._groups_of_like_length(lengths, max_keys=2000))
    assert sorted(i for group in groups for i in group) == list(range(7))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or len(group) * longest <= 2000
        assert all(lengths[i] + 64 >= 0.75 * longest for i in group)


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 40), experts=st.integers(1, 8), k=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_moe_equals_reference(tokens, experts, k, seed):
    k = min(k, experts)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    chosen = torch.rand(tokens, experts, generator=generator).topk(k).indices
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64)
    gate_up = torch.randn(experts, 24, 16, generator=generator, dtype=torch.float64)
    down = torch.randn(experts, 16, 12, generator=generator, dtype=torch.float64)
    arguments = (x, weights, chosen, gate_up, down, "silu")
    torch.testing.assert_close(cpu.moe(*arguments), reference.moe(*arguments))


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 6), vocab=st.sampled_from([1, 5, 300, 2000]))
def test_sample_chooses_what_the_reference_chooses(seed, rows, vocab):
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    logits = torch.randn(rows, vocab, generator=generator) * pick(0.1, 1.0, 8.0)[:, None]
    logits = torch.where(pick(False, True)[:, None], logits.round(), logits)  # with ties
    logits[torch.rand(rows, vocab, generator=generator) < 0.2] = float("-inf")
    logits[:, 0] = torch.where(pick(False, False, False, True), NAN, logits[:, 0])
    batch = SampleBatch(
        temperature=pick(0.0, 0.7, 1.0, 3.0),
        top_k=pick(0, 0, 1, 4, 5000).int(),
        top_p=pick(1.0, 1.0, 0.3, 0.95),
        min_p=pick(0.0, 0.0, 0.05),
        seed=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        position=torch.randint(0, 5000, (rows,), generator=generator),
        all_greedy=False,
        any_filter=True,
    )
    assert cpu.sample(logits, batch).tolist() == reference.sample(logits, batch).tolist()
    batch.any_filter = False
    assert cpu.sample(logits, batch).tolist() == reference.sample(logits, batch).tolist()
    batch.all_greedy = True
    assert cpu.sample(logits, batch).tolist() == reference.sample(logits, batch).tolist()


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 6.0])
def test_tokens_that_are_left_out_never_win(spread, temperature):
    """Flat and steep distributions, and tokens that are forbidden."""
    torch.manual_seed(int(10 * spread + temperature))
    n, vocab = 32, 3000
    logits = spread * torch.randn(n, vocab)
    logits[::3, ::2] = -torch.inf
    batch = SampleBatch(
        temperature=torch.full((n,), temperature),
        top_k=torch.zeros(n, dtype=torch.int32),
        top_p=torch.ones(n),
        min_p=torch.zeros(n),
        seed=torch.randint(1 << 62, (n,)),
        position=torch.arange(n),
        all_greedy=False,
        any_filter=False,
    )
    assert cpu.sample(logits, batch).tolist() == reference.sample(logits, batch).tolist()
    double = logits.double()
    assert cpu.sample(double, batch).tolist() == reference.sample(double, batch).tolist()
