"""The mask of a grammar forbids the same tokens on every device, and touches only rows that have one."""

import numpy as np
import pytest
import torch

from tokenmill.ops.shaping import allow_only, allow_only_on_host

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device")


def case(vocab, rows, device, seed=0):
    """Logits, the table of masks, rows in some order, and what they allow; every other row has no mask."""
    random = np.random.default_rng(seed)
    words = (-(-vocab // 32) + 2) & ~1  # as the sampler makes it: an even number with the flag
    table = random.integers(-(2**31), 2**31, (rows + 3, words), dtype=np.int64).astype(np.int32)
    table[:, 0] = np.arange(rows + 3) % 2
    table[1, 1:] = 0
    table[1, 1 + (vocab - 1) // 32] = np.uint32(1 << (vocab - 1) % 32).astype(np.int32)  # only the last token
    order = random.permutation(rows + 3)[:rows]
    order[0] = 1
    bits = np.unpackbits(table[order, 1:].copy().view(np.uint8), axis=1, bitorder="little")[:, :vocab] != 0
    allowed = bits | (table[order, :1] == 0)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return logits.to(device), torch.from_numpy(table).to(device), torch.from_numpy(order).to(device), allowed


def implementations(device):
    from tokenmill.ops.triton.sample.mask import allow_only as in_triton

    return [allow_only, in_triton] + ([allow_only_on_host] if device == "cpu" else [])


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096, 4097, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forbidden_tokens_become_impossible_and_others_stay(vocab, dtype, triton_device):
    logits, masks, rows, allowed = case(vocab, 7, triton_device)
    logits = logits.to(dtype)
    for forbid in implementations(triton_device):
        shaped = logits.clone()
        forbid(shaped, masks, rows)
        seen = shaped.float().cpu().numpy()
        assert (np.isinf(seen) == ~allowed).all(), forbid
        assert (seen[allowed] == logits.float().cpu().numpy()[allowed]).all(), forbid


def test_logits_may_be_a_slice_of_a_padded_vocabulary(triton_device):
    logits, masks, rows, allowed = case(1000, 5, triton_device)
    for forbid in implementations(triton_device):
        padded = torch.full((5, 1056), 7.0, device=triton_device)
        padded[:, :1000] = logits
        forbid(padded[:, :1000], masks, rows)
        assert (padded[:, 1000:] == 7.0).all()
        assert (np.isinf(padded[:, :1000].cpu().numpy()) == ~allowed).all()
