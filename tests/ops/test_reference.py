"""The reference ops do what their signatures say, checked against plain formulas and torch's own functions."""

import math

import pytest
import torch
import torch.nn.functional as F

from tokenmill.ops import reference
from tokenmill.ops.types import AttentionBatch, Mask, SampleBatch

D = torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_rms_norm_equals_torch():
    x, weight = torch.randn(3, 5, 16, dtype=D), torch.randn(16, dtype=D)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5))


def test_rms_norm_of_half_precision_is_computed_in_float32():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # the squares overflow float16
    torch.testing.assert_close(reference.rms_norm(x, torch.ones(4), 1e-6), torch.ones(1, 4, dtype=torch.float16))


def test_add_rms_norm_returns_the_norm_and_the_new_residual():
    x, residual, weight = (torch.randn(4, 8, dtype=D) for _ in range(3))
    normed, total = reference.add_rms_norm(x.clone(), residual.clone(), weight[0], 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (8,), weight[0], 1e-6))


def rope_inputs(rotated):
    q, k, v = torch.randn(3, 2, 8, dtype=D), torch.randn(3, 1, 8, dtype=D), torch.randn(3, 1, 8, dtype=D)
    angle = torch.rand(20, rotated // 2, dtype=D) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    return q, k, v, angle, cos_sin


@pytest.mark.parametrize("rotated", [8, 4])
def test_rope_turns_pairs_as_complex_numbers_and_writes_the_cache(rotated):
    q, k, v, angle, cos_sin = rope_inputs(rotated)
    positions, slots = torch.tensor([5, 0, 19]), torch.tensor([3, -1, 6])
    k_cache, v_cache = torch.full((2, 4, 1, 8), 7.0, dtype=D), torch.full((2, 4, 1, 8), 7.0, dtype=D)

    def turned(x):
        half = rotated // 2
        pairs = torch.complex(x[..., :half], x[..., half:rotated])
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)[positions][:, None]
        return torch.cat([pairs.real, pairs.imag, x[..., rotated:]], dim=-1)

    expected_q, expected_k = turned(q), turned(k)
    reference.rope_kv_write(q, k, v, cos_sin, positions, k_cache, v_cache, slots)
    torch.testing.assert_close(q, expected_q)
    flat_k, flat_v = k_cache.view(8, 1, 8), v_cache.view(8, 1, 8)
    torch.testing.assert_close(flat_k[[3, 6]], expected_k[[0, 2]])
    torch.testing.assert_close(flat_v[[3, 6]], v[[0, 2]])
    untouched = [0, 1, 2, 4, 5, 7]  # the token with a negative slot is written nowhere
    assert (flat_k[untouched] == 7).all() and (flat_v[untouched] == 7).all()


def single_row_batch(count, context, block_size):
    blocks = -(-context // block_size)
    return AttentionBatch(
        rows=torch.tensor([0]),
        q_start=torch.tensor([0, count]),
        context=torch.tensor([context]),
        block_tables=torch.randperm(blocks).int()[None],
        num_singles=int(count == 1),
        max_query=count,
        max_context=context,
        host_rows=[0],
        host_counts=[count],
        host_context=[context],
    )


@pytest.mark.parametrize("count,context", [(1, 13), (13, 13), (5, 13)])
@pytest.mark.parametrize("mask", [Mask(), Mask(window=4), Mask(softcap=1.5)], ids=str)
def test_attention_equals_a_loop_over_queries_and_heads(count, context, mask):
    q, batch = torch.randn(count, 4, 6, dtype=D), single_row_batch(count, context, 4)
    k_cache, v_cache = torch.randn(4, 4, 2, 6, dtype=D), torch.randn(4, 4, 2, 6, dtype=D)
    found = reference.attention(q, k_cache, v_cache, batch, mask, 0.4)
    for i in range(count):
        position = context - count + i
        keys = [p for p in range(position + 1) if mask.window is None or position - p < mask.window]
        slots = [(int(batch.block_tables[0, p // 4]), p % 4) for p in keys]
        for head in range(4):
            scores = [float(q[i, head] @ k_cache[block, offset, head // 2]) * 0.4 for block, offset in slots]
            if mask.softcap:
                scores = [mask.softcap * math.tanh(score / mask.softcap) for score in scores]
            weights = torch.tensor(scores, dtype=D).softmax(0)
            values = torch.stack([v_cache[block, offset, head // 2] for block, offset in slots])
            torch.testing.assert_close(found[i, head], weights @ values)


def test_tree_attention_sees_the_context_and_its_own_branch():
    seen = reference.visible(3, 5, Mask(), torch.device("cpu"), torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool())
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]


@pytest.mark.parametrize("kind,function", [("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))])
def test_act_mul_multiplies_the_activated_gate(kind, function):
    x = torch.randn(3, 10, dtype=D)
    torch.testing.assert_close(reference.act_mul(x, kind), function(x[:, :5]) * x[:, 5:])


def test_moe_equals_a_loop_over_tokens():
    x, weights = torch.randn(5, 6, dtype=D), torch.rand(5, 2, dtype=D)
    experts = torch.tensor([[0, 3], [3, 1], [0, 1], [3, 0], [1, 3]])
    gate_up, down = torch.randn(4, 8, 6, dtype=D), torch.randn(4, 6, 4, dtype=D)
    found = reference.moe(x, weights, experts, gate_up, down, "silu")
    for token in range(5):
        total = torch.zeros(6, dtype=D)
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            total += weight * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(found[token], total)


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    settings = (torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return reference.kept_tokens(torch.tensor([logits]), *settings)[0].nonzero()[:, 0].tolist()


def test_filters_keep_ties_with_the_last_token_kept():
    assert kept([1.0, 3.0, 2.0, 3.0, 2.0], top_k=1) == [1, 3]
    assert kept([1.0, 3.0, 2.0, 3.0, 2.0], top_k=3) == [1, 2, 3, 4]
    equal = [math.log(0.25)] * 4
    assert kept(equal, top_p=0.1) == [0, 1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert kept(logits, top_p=0.45) == [0]
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_p=0.94) == [0, 1, 2]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-9) == [0]


def test_top_p_is_taken_over_what_top_k_left():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_p=0.5) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.5) == [0]  # 0.4 / 0.7 is more than a half


def test_min_p_is_relative_to_the_best():
    logits = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert kept(logits, min_p=0.5) == [0, 1]


def sample(logits, temperature):
    n = len(logits)
    off = torch.zeros(n)
    batch = SampleBatch(
        torch.full((n,), temperature), off.int(), off + 1, off, off.long(), off.long(), temperature == 0, False
    )
    return reference.sample(logits, batch).tolist()


def test_greedy_takes_the_first_of_equal_logits():
    assert sample(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), 0.0) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_best_are_marked(temperature):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1.0, nan, 0.0], [-inf, -inf, -inf], [-inf, 0.5, -inf], [inf, 0.0, 0.0]])
    assert sample(logits, temperature) == [-1, -1, 1, -1]
