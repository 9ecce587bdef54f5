"""Routing chooses the experts it says it does, for every token alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.model.moe import route
from tokenmill.model.spec import MoESpec


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
