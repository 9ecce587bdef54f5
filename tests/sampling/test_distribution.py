"""Sampling draws from the distribution it claims, and its noise is as good as independent."""

import pytest
import torch
from statistics_helpers import chi_square_z

from tokenmill.ops import cpu, reference
from tokenmill.ops.noise import gumbel_noise
from tokenmill.ops.types import SampleBatch

VOCAB = 60
DRAWS = 20_000
SETTINGS = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.03},
}


def batch_of(seed, position, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    n = len(seed)
    return SampleBatch(
        temperature=torch.full((n,), temperature),
        top_k=torch.full((n,), top_k, dtype=torch.int32),
        top_p=torch.full((n,), top_p),
        min_p=torch.full((n,), min_p),
        seed=seed,
        position=position,
        all_greedy=temperature == 0,
        any_filter=bool(top_k or top_p < 1 or min_p),
    )


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The claimed distribution, token by token in plain arithmetic; the logits hold no ties."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = ranked[: top_k or None]
    total = sum(probs[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass / total < top_p:
            nucleus.append(token)
        mass += probs[token]
    kept = [token for token in nucleus if probs[token] >= min_p * probs[ranked[0]]]
    total = sum(probs[token] for token in kept)
    out = torch.zeros(len(probs), dtype=torch.float64)
    for token in kept:
        out[token] = probs[token] / total
    return out


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("key", ["seeds", "positions"])
@pytest.mark.parametrize("module", [reference, cpu], ids=["reference", "cpu"])
def test_draws_follow_the_exact_distribution(module, key, name):
    draws = DRAWS if module is reference else DRAWS // 4
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    counter, fixed = torch.arange(draws), torch.full((draws,), 123)
    seed, position = (counter, fixed) if key == "seeds" else (fixed, counter)
    drawn = module.sample(logits.expand(draws, VOCAB), batch_of(seed, position, **SETTINGS[name]))
    observed = torch.bincount(drawn, minlength=VOCAB)
    assert abs(chi_square_z(observed, exact(logits, **SETTINGS[name]) * draws)) < 4


@pytest.mark.parametrize(
    "step_seed,step_position", [(0, 1), (1, 0), (1, -1), (1 << 32, 0), (0, 1 << 16)], ids=lambda step: str(step)
)
def test_neighbouring_draws_look_independent(step_seed, step_position):
    logits = torch.linspace(0, 1.5, 6)
    seed, position = torch.arange(DRAWS) * 3, torch.arange(DRAWS) % 997 + 1
    first = reference.sample(logits.expand(DRAWS, 6), batch_of(seed, position))
    second = reference.sample(logits.expand(DRAWS, 6), batch_of(seed + step_seed, position + step_position))
    probs = exact(logits)
    observed = torch.bincount(first * 6 + second, minlength=36)
    assert abs(chi_square_z(observed, torch.outer(probs, probs).flatten() * DRAWS)) < 4


def uniforms(seed, position, vocab):
    return torch.exp(-torch.exp(-gumbel_noise(seed, position, vocab).double()))


@pytest.mark.parametrize(
    "seed,position,vocab",
    [
        (torch.arange(100), torch.zeros(100, dtype=torch.int64), 10_000),
        (torch.zeros(1000, dtype=torch.int64), torch.arange(1000), 1000),
        (torch.arange(1000) << 32, torch.arange(1000), 1000),
        (-torch.arange(1000), torch.arange(1000) * 4096, 1000),
    ],
    ids=["seeds", "positions", "high seeds", "strides"],
)
def test_noise_is_uniform_and_uncorrelated(seed, position, vocab):
    u = uniforms(seed, position, vocab)
    count = u.numel()
    histogram = torch.histc(u.flatten(), bins=256, min=0, max=1)
    assert abs(chi_square_z(histogram, torch.full((256,), count / 256))) < 4
    centred = (u - 0.5) * 12**0.5
    for shift in ((1, 0), (0, 1), (1, 1), (2, 0), (0, 64), (7, 3)):
        moved = centred.roll(shift, (0, 1))
        correlation = (centred * moved).mean() * count**0.5  # standard normal if independent
        assert abs(correlation) < 4.5, shift


def test_no_two_rows_share_their_noise():
    seed, position = torch.meshgrid(torch.arange(40), torch.arange(40), indexing="ij")
    noise = gumbel_noise(seed.flatten(), position.flatten(), 16)
    assert len(torch.unique(noise, dim=0)) == 1600


def test_noise_is_finite_and_reaches_far_enough_for_rare_tokens():
    noise = gumbel_noise(torch.arange(200), torch.arange(200), 50_000)
    assert noise.isfinite().all()
    assert noise.max() > 14  # of 10 million draws the largest is about ln(10 million) = 16


@pytest.mark.parametrize("module", [reference, cpu], ids=["reference", "cpu"])
def test_a_seed_gives_the_same_token_in_any_batch(module):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 500, generator=generator) * 3
    seed, position = torch.arange(24) * 7919, torch.arange(24) * 31
    batch = batch_of(seed, position, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)
    together = module.sample(logits, batch).tolist()
    order = torch.randperm(24, generator=generator)
    shuffled = module.sample(
        logits[order], batch_of(seed[order], position[order], temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)
    )
    assert shuffled.tolist() == [together[i] for i in order]
    for i in range(24):
        alone = batch_of(seed[i : i + 1], position[i : i + 1], temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)
        assert module.sample(logits[i : i + 1], alone).tolist() == [together[i]]
    assert len(set(together)) > 5
