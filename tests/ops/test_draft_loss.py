"""The kernel of the draft loss is what draft/loss.py computes without it."""

from __future__ import annotations

import pytest
import torch

from tokenmill.draft.loss import LEAST_PROBABILITY, _rows


@pytest.mark.parametrize(("rows", "vocabulary", "dtype"), [(9, 37, torch.float32), (5, 128, torch.bfloat16)])
def test_losses_chances_and_gradients_are_those_of_torch(rows, vocabulary, dtype, triton_device):
    from tokenmill.ops.triton.draft_loss import draft_loss_rows

    torch.manual_seed(rows)
    logits = (3 * torch.randn(rows, vocabulary)).to(triton_device, dtype)
    target = (3 * torch.randn(rows, vocabulary + 5)).softmax(-1)[:, :vocabulary].to(triton_device, dtype)
    sampled = torch.randint(-1, vocabulary, (rows,)).to(triton_device)
    sampled[0], sampled[1] = -1, target[1].argmax()
    warm = (torch.arange(rows) % 3 > 0).to(triton_device)
    share = torch.rand(rows).to(triton_device)
    expected = _rows(logits, target, sampled, warm, share, 0.3, 1.7)
    found = *draft_loss_rows(logits, target, sampled, warm, share, 0.3, 1.7, LEAST_PROBABILITY), logits
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    assert found[1][0] == 0 and 0 < found[1].max() <= 1.001
