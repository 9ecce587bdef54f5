"""Routing chooses the experts it says it does, for every token alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.model.moe import experts_of, route
from tokenmill.model.spec import MoESpec
from tokenmill.ops.registry import Implementation, Need, Ops, select


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.integers(2, 6),
    normalize=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_experts_are_the_best_of_the_best_groups(groups, per_group, normalize, seed, data):
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * per_group))
    experts = groups * per_group
    moe = MoESpec((True,), experts, top_k, 8, normalize=normalize, scale=2.5, groups=groups, top_groups=top_groups)
    scores = torch.randn(5, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    weights, chosen = route(scores, moe)
    for token in range(5):
        probs = scores[token].softmax(-1).tolist()
        best = {g: max(probs[g * per_group : (g + 1) * per_group]) for g in range(groups)}
        allowed = sorted(best, key=lambda g: -best[g])[:top_groups]
        ranked = sorted((e for e in range(experts) if e // per_group in allowed), key=lambda e: -probs[e])[:top_k]
        assert chosen[token].tolist() == ranked
        total = sum(probs[e] for e in ranked) if normalize else 1.0
        expected = torch.tensor([2.5 * probs[e] / total for e in ranked], dtype=torch.float64)
        torch.testing.assert_close(weights[token], expected)


def routing_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 16, generator=generator, dtype=dtype), torch.randn(8, 16, generator=generator, dtype=dtype)


def with_fused_routing(calls):
    """The ops of a CPU, and a fused routing op that only notes what it was asked for."""

    def fused(x, router, top_k, normalize, scale):
        calls.append((top_k, normalize, scale))
        return x.new_zeros(len(x), top_k), torch.zeros(len(x), top_k, dtype=torch.int32)

    plain = select(Need("cpu", torch.float32))
    return Ops(plain.chosen | {"route": Implementation("route", "fused", fused)}, plain.reasons | {"route": ""})


def test_without_a_fused_op_routing_is_done_in_torch_in_the_precision_of_the_router():
    moe = MoESpec((True,), 8, 3, 8, normalize=True)
    x, router = routing_inputs()
    weights, experts = experts_of(x.bfloat16(), router, moe, select(Need("cpu", torch.bfloat16)))
    expected = route(x.bfloat16().float() @ router.T, moe)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected[0])
    assert torch.equal(experts, expected[1])


def test_a_fused_op_gets_plain_routing_only():
    calls = []
    ops = with_fused_routing(calls)
    experts_of(*routing_inputs(), MoESpec((True,), 8, 3, 8, normalize=True, scale=2.5), ops)
    assert calls == [(3, True, 2.5)]
    grouped = MoESpec((True,), 8, 3, 8, groups=4, top_groups=2)
    x, router = routing_inputs()
    assert torch.equal(experts_of(x, router, grouped, ops)[1], route(x @ router.T, grouped)[1])
    experts_of(*routing_inputs(torch.float64), MoESpec((True,), 8, 3, 8), ops)
    assert len(calls) == 1
