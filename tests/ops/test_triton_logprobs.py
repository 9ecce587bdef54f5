"""The Triton op for log-probabilities says what the reference says: values, ranks, the best tokens and their order."""

import numpy as np
import pytest
import torch

from tokenmill.ops import reference
from tokenmill.ops.types import LOGPROB_BUCKETS, LOGPROB_WORDS

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")

VOCAB = 9000  # more than one chunk
NAN, INF = float("nan"), float("inf")


def case(rows, vocab, device, spread=3.0, steps=0.0, width=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=random) * spread
    if steps:
        logits = (logits / steps).round() * steps
    tokens = torch.randint(0, vocab, (rows,), generator=random)
    widths = torch.full((rows,), min(width, vocab), dtype=torch.int32, device=device)
    return logits.to(device), tokens.to(device), widths


def measured(logits, tokens, widths, k):
    """Token, rank, log-probability, ids and values, as numpy arrays."""
    from tokenmill.ops.triton.sample.logprobs import logprobs

    words = logprobs(logits, tokens, widths, k).cpu().numpy()
    assert words.shape == (len(tokens), LOGPROB_WORDS + 2 * k) and words.dtype == np.int32
    floats = words.view(np.float32)
    return words[:, 0], words[:, 1], floats[:, 2], words[:, LOGPROB_WORDS : LOGPROB_WORDS + k], floats[:, -k:]


def expected(logits, tokens, k):
    """In float64; of equal logits the lowest id first."""
    logits = logits.double().cpu()
    scores = logits.log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = logits.gather(1, tokens.cpu()[:, None])
    rank = (logits > chosen).sum(-1) + 1
    return rank.numpy(), scores.gather(1, tokens.cpu()[:, None])[:, 0].numpy(), order.numpy(), scores.gather(1, order)


def check(logits, tokens, widths, k):
    token, rank, value, ids, values = measured(logits, tokens, widths, k)
    best = min(k, logits.shape[1])
    want_rank, want_value, want_ids, want_values = expected(logits, tokens, best)
    assert token.tolist() == tokens.tolist()
    assert rank.tolist() == want_rank.tolist()
    np.testing.assert_allclose(value, want_value, rtol=2e-6, atol=2e-5)
    assert ids[:, :best].tolist() == want_ids.tolist()
    np.testing.assert_allclose(values[:, :best], want_values, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("k", LOGPROB_BUCKETS)
@pytest.mark.parametrize("vocab", [1, 100, 4096, VOCAB])
def test_values_ranks_and_best_tokens(vocab, k, triton_device):
    check(*case(3, vocab, triton_device, width=k), k)


@pytest.mark.parametrize("spread,steps", [(2.0, 1.0), (0.0, 0.0), (0.4, 1.0)])
def test_of_equal_logits_the_lowest_id_comes_first(spread, steps, triton_device):
    """Few distinct values: many more groups reach the last of the best than are read at a time. Both zeros are one."""
    check(*case(2, VOCAB, triton_device, spread, steps), 8)


def test_the_reference_says_the_same(triton_device):
    """The layout, and every number where no two logits are equal."""
    from tokenmill.ops.triton.sample.logprobs import logprobs

    logits, tokens, widths = case(4, VOCAB, triton_device)
    widths[2] = -1
    mine, theirs = logprobs(logits, tokens, widths, 8).cpu(), reference.logprobs(logits, tokens, widths, 8).cpu()
    assert mine[:, 0].equal(theirs[:, 0])
    asked = [0, 1, 3]
    ints, floats = [1, *range(3, 11)], [2, *range(11, 19)]
    assert mine[asked][:, ints].equal(theirs[asked][:, ints])
    torch.testing.assert_close(
        mine[asked][:, floats].contiguous().view(torch.float32),
        theirs[asked][:, floats].contiguous().view(torch.float32),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_in_half_precision_are_widened_as_they_are_read(dtype, triton_device):
    from tokenmill.ops.triton.sample.logprobs import logprobs

    logits, tokens, widths = case(3, VOCAB, triton_device)
    logits = logits.to(dtype)
    check(logits, tokens, widths, 8)
    assert logprobs(logits, tokens, widths, 8).equal(logprobs(logits.float(), tokens, widths, 8))


def test_more_best_tokens_than_kernels_are_made_for(triton_device):
    check(*case(2, 300, triton_device, width=40), 40)


def test_rows_that_did_not_ask_get_their_token_alone(triton_device):
    from tokenmill.ops.triton.sample.logprobs import logprobs

    logits, tokens, widths = case(3, VOCAB, triton_device)
    widths[1] = -1
    logits[1], tokens[1] = NAN, -1
    words = logprobs(logits, tokens, widths, 8)
    assert words[:, 0].tolist() == tokens.tolist()
    kept = torch.tensor([0, 2], device=triton_device)
    assert words[kept].equal(logprobs(logits[kept], tokens[kept], widths[kept], 8))


def test_rows_get_as_many_best_tokens_as_they_asked_for(triton_device):
    logits, tokens, widths = case(4, VOCAB, triton_device)
    widths[:] = torch.tensor([0, 1, 8, 5])
    _, rank, value, ids, values = measured(logits, tokens, widths, 32)
    want_rank, want_value, want_ids, want_values = expected(logits, tokens, 8)
    assert rank.tolist() == want_rank.tolist()
    np.testing.assert_allclose(value, want_value, rtol=2e-6, atol=2e-5)
    for row, width in enumerate(widths.tolist()):
        assert ids[row, :width].tolist() == want_ids[row, :width].tolist()
        np.testing.assert_allclose(values[row, :width], want_values[row, :width], rtol=2e-6, atol=2e-5)


def test_logits_that_are_no_numbers_say_so(triton_device):
    """Somebody looks for them among the log-probabilities of a prompt."""
    logits, tokens, widths = case(5, VOCAB, triton_device)
    logits[0, 8123] = NAN
    logits[1, 17] = INF
    logits[2] = -INF
    logits[3, :8000] = logits[3, 8005:] = -INF  # this one is possible, a chunk of it is not
    tokens[3] = 8002
    tokens[4] = -1
    _, _, value, ids, values = measured(logits, tokens, widths, 8)
    assert np.isnan(value[:3]).all() and np.isfinite(value[3:]).all()
    assert sorted(ids[3, :5].tolist()) == [8000, 8001, 8002, 8003, 8004] and np.isfinite(values[3, :5]).all()
    assert ids[3, 5:].tolist() == [0, 1, 2] and (values[3, 5:] == -INF).all()


def test_a_row_has_the_same_bits_in_any_batch(triton_device):
    from tokenmill.ops.triton.sample.logprobs import logprobs

    logits, tokens, widths = case(5, VOCAB, triton_device)
    together = logprobs(logits, tokens, widths, 8)
    for row in (0, 3):
        assert logprobs(*(one[row : row + 1] for one in (logits, tokens, widths)), 8)[0].equal(together[row])


def test_logits_may_be_a_slice_of_a_padded_vocabulary(triton_device):
    from tokenmill.ops.triton.sample.logprobs import logprobs

    logits, tokens, widths = case(3, VOCAB, triton_device)
    padded = torch.full((3, VOCAB + 56), NAN, device=triton_device)
    padded[:, :VOCAB] = logits
    assert logprobs(padded[:, :VOCAB], tokens, widths, 8).equal(logprobs(logits, tokens, widths, 8))
