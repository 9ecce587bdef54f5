"""The Triton sampler chooses the reference's tokens: same noise, same filters, same ties."""

import pytest
import torch
from cases import sample_case

from tokenmill.ops import reference
from tokenmill.ops.noise import gumbel_noise

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")

VOCAB = 9000  # more than one block of either kernel
CLOSE = 1e-5  # noise may differ in the last bit of a logarithm


def check(logits: torch.Tensor, batch) -> None:
    """Equal tokens, except where two noisy values are so close that the last bit of a logarithm decides."""
    from tokenmill.ops.triton.sample.sampler import sample

    got, expected = sample(logits, batch), reference.sample(logits, batch)
    assert got.dtype == torch.int64
    noise = gumbel_noise(batch.seed, batch.position, logits.shape[1])
    for row in (got != expected).nonzero().flatten().tolist():
        assert batch.temperature[row] > 0, f"greedy row {row}: {got[row]} instead of {expected[row]}"
        assert got[row] >= 0 and expected[row] >= 0
        noisy = logits[row] / batch.temperature[row] + noise[row]
        assert abs(noisy[got[row]] - noisy[expected[row]]) < CLOSE, f"row {row}: {got[row]} not {expected[row]}"


def test_noise_has_the_same_bits(triton_device):
    """Flat logits: the token is the argmax of the noise alone."""
    logits, batch = sample_case(40, VOCAB, spread=0.0, device=triton_device)
    check(logits, batch)


@pytest.mark.parametrize("vocab", [1, 100, 4096, VOCAB])
def test_unfiltered_rows_equal_reference(vocab, triton_device):
    temperature = [0.0, 0.3, 1.0, 2.5, 0.0, 1e-4]
    check(*sample_case(6, vocab, temperature=temperature, device=triton_device))


def test_greedy_takes_the_first_of_equals(triton_device):
    from tokenmill.ops.triton.sample.sampler import sample

    logits, batch = sample_case(2, VOCAB, temperature=0.0, device=triton_device)
    logits[0, [8000, 70, 5000]] = 50.0
    logits[1, [8999, 4096]] = 50.0
    assert sample(logits, batch).tolist() == [70, 4096]


@pytest.mark.parametrize("filters", [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": [3, 20, 100, 1000, 8500, 9000, 20000, 0]},
    {"top_p": 0.9},
    {"top_p": [0.01, 0.1, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0]},
    {"min_p": 0.1},
    {"min_p": [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0, 0.3]},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": [40, 0, 5, 100, 2, 1, 0, 300], "top_p": [0.5, 0.9, 1.0, 0.7, 0.6, 0.9, 0.2, 0.97], "min_p": 0.02},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_filtered_rows_equal_reference(filters, spread, triton_device):
    temperature = [0.7, 1.0, 1.5, 0.0, 0.6, 1.0, 2.0, 0.9]
    check(*sample_case(8, VOCAB, spread=spread, temperature=temperature, device=triton_device, **filters))


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.5}], ids=str)
def test_ties_with_the_last_kept_token_are_kept(filters, triton_device):
    """Few distinct logits: cutting a tie, or keeping one value too many, changes most of these draws."""
    for seed in range(2):
        logits, batch = sample_case(12, 600, spread=2.0, steps=1.0, device=triton_device, seed=seed, **filters)
        check(logits, batch)


def test_the_edge_of_the_nucleus_is_where_the_reference_has_it(triton_device):
    """Masses above the tokens are 0, 0.4, 0.7 and 0.9; two tokens are kept just below 0.7, and three just above."""
    from tokenmill.ops.triton.sample.sampler import sample

    logits, batch = sample_case(60, 4, top_p=[0.695, 0.705] * 30, device=triton_device)
    logits[:] = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    tokens = sample(logits, batch)
    assert set(tokens[0::2].tolist()) == {1, 3}
    assert set(tokens[1::2].tolist()) == {1, 3, 0}
    check(logits, batch)


def test_top_k_keeps_exactly_k_of_neighbours_that_share_a_group(triton_device):
    """The search begins with the largest logits of groups of neighbours, and here few groups hold all that is kept."""
    from tokenmill.ops.triton.sample.sampler import sample

    best = [5, 8197, 7, 8199, 100, 8198]
    logits, batch = sample_case(48, VOCAB, spread=0.1, temperature=2.0, top_k=[2, 3, 4, 5] * 12, device=triton_device)
    logits[:, best] += torch.tensor([30.0, 29.9, 29.8, 29.7, 29.6, 29.5], device=triton_device)
    logits[:, best] = logits[:1, best].sort(descending=True).values
    tokens = sample(logits, batch)
    for i, kept in enumerate([2, 3, 4, 5]):
        assert set(tokens[i::4].tolist()) == set(best[:kept])


def test_rows_that_no_token_can_be_taken_from_give_minus_one(triton_device):
    from tokenmill.ops.triton.sample.sampler import sample

    for filters in ({}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.1}):
        for temperature in (0.0, 1.0):
            logits, batch = sample_case(5, VOCAB, temperature=temperature, device=triton_device, **filters)
            logits[0, 8123] = float("nan")
            logits[1] = float("-inf")
            logits[2, 17] = float("inf")
            logits[3, 1:] = float("-inf")
            tokens = sample(logits, batch).tolist()
            assert tokens[:4] == [-1, -1, -1, 0]
            assert tokens[4] == reference.sample(logits, batch)[4]


def test_fewer_possible_tokens_than_top_k(triton_device):
    """A grammar leaves a handful of tokens; the filter must neither fail nor let a forbidden one in."""
    logits, batch = sample_case(6, VOCAB, top_k=[50, 3, 4, 5, 2, 1], top_p=0.9, device=triton_device)
    allowed = torch.tensor([5, 4100, 8200, 8999], device=triton_device)
    masked = torch.full_like(logits, float("-inf"))
    masked[:, allowed] = logits[:, allowed]
    check(masked, batch)


def test_a_row_draws_the_same_token_in_any_batch(triton_device):
    from tokenmill.ops.triton.sample.sampler import sample

    for filters in ({}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.05}):
        logits, batch = sample_case(9, VOCAB, device=triton_device, **filters)
        together = sample(logits, batch)
        for row in (0, 5):
            alone = type(batch)(**{
                name: value[row : row + 1] if isinstance(value, torch.Tensor) else value
                for name, value in vars(batch).items()
            })  # fmt: skip
            assert sample(logits[row : row + 1], alone).item() == together[row]


def test_a_row_without_filters_draws_the_same_token_beside_filtered_ones(triton_device):
    """Other rows' filters decide which kernels run."""
    from tokenmill.ops.triton.sample.sampler import sample

    temperature = [0.0, 1.0, 0.7, 1.3, 1.0]
    logits, plain = sample_case(5, VOCAB, temperature=temperature, device=triton_device)
    _, beside = sample_case(5, VOCAB, temperature=temperature, top_k=[0, 0, 0, 0, 3], device=triton_device)
    assert beside.any_filter and not plain.any_filter
    assert torch.equal(sample(logits, beside)[:4], sample(logits, plain)[:4])


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_logits_may_be_a_slice_of_a_padded_vocabulary(filters, triton_device):
    from tokenmill.ops.triton.sample.sampler import sample

    logits, batch = sample_case(4, VOCAB, device=triton_device, **filters)
    padded = torch.full((4, VOCAB + 56), float("nan"), device=triton_device)
    padded[:, :VOCAB] = logits
    assert torch.equal(sample(padded[:, :VOCAB], batch), sample(logits, batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.8}], ids=str)
def test_logits_in_half_precision_are_widened_as_they_are_read(filters, dtype, triton_device):
    from tokenmill.ops.triton.sample.sampler import sample

    logits, batch = sample_case(4, VOCAB, temperature=[0.0, 1.0, 0.7, 1.3], device=triton_device, **filters)
    logits = logits.to(dtype)
    assert torch.equal(sample(logits, batch), sample(logits.float(), batch))


@pytest.mark.parametrize("filters", [
    {"top_p": [0.9, 0.5, 0.1, 0.02, 1e-6]},
    {"top_p": [0.9, 0.5, 0.1, 1.0, 1.0], "min_p": [0.3, 0.9, 0.01, 0.9, 0.99]},
    {"top_k": [7_000, 400, 64, 1, 19_999], "top_p": [0.5, 0.9, 0.8, 1.0, 0.05]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_nearly_flat_rows_that_reject_many_candidates_equal_reference(filters, spread, triton_device):
    """Long searches over many groups, chunks and spans: the last kernel has to go on where the rounds end."""
    logits, batch = sample_case(5, 20_000, spread=spread, device=triton_device, **filters)
    if spread == 0.0:  # the nucleus ends in one large tie, with a few tokens above it
        logits[:, [3, 10_000, 19_999]] = torch.tensor([2.0, 1.0, 0.5], device=triton_device)
    check(logits, batch)


@pytest.mark.parametrize("shape", [
    {"rounds": 1}, {"rounds": 3}, {"group": 16, "chunk": 1024, "span": 3}, {"group": 64, "tile": 16},
], ids=str)  # fmt: skip
def test_how_the_work_is_cut_does_not_change_tokens(shape, triton_device):
    from tokenmill.ops.triton.sample.filtered import FilterShape, sample_filtered

    top_k, top_p = [40, 0, 0, 300, 0, 3], [0.9, 0.6, 0.1, 0.3, 1.0, 1.0]
    for spread in (0.3, 3.0):
        logits, batch = sample_case(
            6,
            VOCAB,
            spread=spread,
            top_k=top_k,
            top_p=top_p,
            min_p=[0.0, 0.0, 0.1, 0.0, 0.2, 0.0],
            device=triton_device,
        )
        usual, other = torch.empty_like(batch.seed), torch.empty_like(batch.seed)
        sample_filtered(logits, batch, usual)
        sample_filtered(logits, batch, other, FilterShape(**shape))
        assert torch.equal(usual, other)


def test_a_mixed_batch_gives_each_row_its_own_filter(triton_device):
    """Greedy, plain, impossible and filtered rows side by side take different ways through the same kernels."""
    logits, batch = sample_case(
        8, VOCAB,
        temperature=[0.0, 1.0, 0.7, 0.0, 1.0, 1.3, 1.0, 1.0],
        top_k=[0, 0, 40, 40, 0, 0, 5, 0], top_p=[1.0, 1.0, 0.9, 0.9, 0.5, 1.0, 1.0, 0.9],
        min_p=[0.0, 0.0, 0.0, 0.1, 0.0, 0.2, 0.0, 0.0], device=triton_device,
    )  # fmt: skip
    logits[6, 4000] = float("nan")
    logits[7] = float("-inf")
    check(logits, batch)


@pytest.mark.parametrize("filters", [{"top_p": 0.3}, {"top_k": 600, "top_p": 0.3}], ids=str)
def test_both_zeros_are_one_value(filters, triton_device):
    """Neither is above the other although their bits differ, and both are outside: a third of the tokens is above."""
    logits, batch = sample_case(8, 1200, spread=0.0, device=triton_device, **filters)
    logits[:, ::2] = -0.0
    logits[:, ::3] = 1.0
    check(logits, batch)


def test_values_that_overflow_end_the_search(triton_device):
    from tokenmill.ops.triton.sample.sampler import sample

    for filters in ({"top_p": 0.5, "min_p": 0.1}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.5}):
        logits, batch = sample_case(2, 600, temperature=1e-4, device=triton_device, **filters)
        tokens = sample(logits * 1e36, batch)
        assert ((tokens >= 0) & (tokens < 600)).all()
