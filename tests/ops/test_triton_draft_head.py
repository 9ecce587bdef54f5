"""The kernels around a draft head's products, against torch."""

from __future__ import annotations

import pytest
import torch

from tokenmill.ops import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "hidden"), [(576, 576), (20, 44)])
def test_the_input_is_the_norm_of_state_and_embedding(dtype, width, hidden, triton_device):
    from tokenmill.ops.triton.draft_head import head_input

    generator = torch.Generator().manual_seed(width)
    state, embed = (torch.randn(n, w, generator=generator).to(dtype) for n, w in ((5, width), (11, hidden)))
    weight, ids = torch.rand(width + hidden, generator=generator).to(dtype), torch.tensor([3, 0, 10, 3, 7])
    state, embed, weight, ids = (one.to(triton_device) for one in (state, embed, weight, ids))
    expected = reference.rms_norm(torch.cat([state, embed[ids]], -1), weight, 1e-5)
    torch.testing.assert_close(head_input(state, ids, embed, weight, 1e-5), expected)


@pytest.mark.parametrize("vocab", [8192, 5000, 70])
def test_the_likeliest_token_is_drafted_and_kept(vocab, triton_device):
    from tokenmill.ops.triton.draft_head import head_pick

    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator)
    logits[2, 9] = logits[2, vocab - 1] = 50.0  # the first of equals, as argmax has it
    names = torch.randperm(3 * vocab, generator=generator)[:vocab]
    rows, drafts = torch.tensor([5, 0, 3, 2]), torch.full((7, 4), -5)
    expected = names[logits.argmax(-1)]
    logits, names, rows, drafts = (one.to(triton_device) for one in (logits, names, rows, drafts))
    assert head_pick(logits, names, rows, drafts, 2).tolist() == expected.tolist()
    assert drafts[[5, 0, 3, 2], 2].tolist() == expected.tolist() and int((drafts == -5).sum()) == 24
