"""Penalties, bias, forbidden words and stop tokens change the same logits on every device, and no other row's."""

import numpy as np
import pytest
import torch

from tokenmill.engine.step import Admission
from tokenmill.ops import shaping
from tokenmill.ops.types import ShapeBatch
from tokenmill.params import SamplingParams
from tokenmill.sampling.settings import cut_edits, pack_edits

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device")

VOCAB, LENGTH = 700, 2600  # a row's tokens are more than one block


class Case:
    """A table of tokens and rows with settings; `shaped` are the logits after an implementation had them."""

    def __init__(self, rows, positions, device, slots=64, seed=0, **settings):
        random = torch.Generator().manual_seed(seed)
        self.device, n = device, len(rows)
        table = torch.randint(0, VOCAB, (max(rows) + 1, LENGTH), generator=random, dtype=torch.int32)
        table[:, ::7] = 5  # some tokens are there hundreds of times
        self.logits = (torch.randn(n, VOCAB, generator=random) * 4).to(device)
        self.pieces = []  # what edits_at points to
        columns = {"prompt_len": 10, "repetition": 1.0, "presence": 0.0, "frequency": 0.0, "stops_from": 0} | settings
        ints = ("prompt_len", "stops_from")
        self.batch = ShapeBatch(
            rows=torch.tensor(rows, device=device),
            positions=torch.tensor(positions, device=device),
            tokens=table.to(device),
            **{
                name: torch.tensor(
                    value if isinstance(value, list) else [value] * n,
                    dtype=torch.int32 if name in ints else torch.float32,
                    device=device,
                )
                for name, value in columns.items()
            },
            edits={},
            edits_at=torch.zeros(n, dtype=torch.int64, device=device),
            masks=None,
            mask_rows=torch.tensor(rows, device=device),
            counters=torch.zeros(slots, VOCAB, dtype=torch.int32, device=device),
        )

    def edit(self, row, stop_ids=(), **params):
        words = pack_edits(Admission(row, [1], 1, SamplingParams(**params), 0, list(stop_ids)), VOCAB)
        packed = torch.from_numpy(words).to(self.device)
        self.pieces.append(packed)
        self.batch.edits[row] = cut_edits(packed, words)
        self.batch.edits_at[self.batch.rows == row] = packed.data_ptr()

    def shaped(self, implementation):
        logits = self.logits.clone()
        implementation(logits, self.batch)
        return logits

    def check(self):
        from tokenmill.ops.triton.sample.shape import shape

        expected, got = self.shaped(shaping.shape), self.shaped(shape)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        assert not self.batch.counters.any()
        return got


@pytest.mark.parametrize("settings", [
    {"repetition": 1.3}, {"repetition": 0.6}, {"presence": 0.7}, {"frequency": 0.3}, {"frequency": -0.2},
    {"repetition": [1.0, 2.0, 1.0, 1.5], "presence": [0.0, 0.0, 1.0, -1.0], "frequency": [0.0, 0.0, 0.0, 0.1]},
], ids=str)  # fmt: skip
def test_penalties_equal_reference(settings, triton_device):
    Case([3, 0, 2, 1], [LENGTH, 1500, 12, 1024], triton_device, prompt_len=[900, 3, 12, 1025], **settings).check()


def test_a_token_that_is_there_thousands_of_times_is_counted_exactly(triton_device):
    case = Case([0], [LENGTH], triton_device, frequency=0.5, repetition=1.5, prompt_len=2)
    case.batch.tokens[0] = 9
    got = case.check()
    before = case.logits[0, 9].item()
    assert got[0, 9].item() == pytest.approx((before * 1.5 if before < 0 else before / 1.5) - 0.5 * (LENGTH - 2), 1e-6)


def test_tokens_that_are_none_and_those_after_the_position_do_not_count(triton_device):
    case = Case([1], [40], triton_device, repetition=2.0, presence=1.0)
    case.batch.tokens[1, 40:] = 123
    case.batch.tokens[1, :40] = 7
    case.batch.tokens[1, 5], case.batch.tokens[1, 6] = -1, VOCAB + 9
    changed = (case.check() != case.logits).nonzero()
    assert changed.tolist() == [[0, 7]]


def test_more_rows_than_counters(triton_device):
    """A program goes on with the next row, and finds its counters as it found them first."""
    rows = list(range(7))
    case = Case(rows, [LENGTH] * 7, triton_device, slots=2, repetition=1.4, frequency=[0.1] * 6 + [0.0])
    assert torch.equal(case.check(), Case(rows, [LENGTH] * 7, triton_device, repetition=1.4,
                                          frequency=[0.1] * 6 + [0.0]).check())  # fmt: skip


def test_edits_equal_reference(triton_device):
    case = Case([4, 2, 4, 0], [30, 31, 33, 1], triton_device, repetition=[1.0, 1.2, 1.0, 1.0], stops_from=[0, 32, 0, 1])
    table = case.batch.tokens
    table[4, :40], table[2, :40], table[0, 0] = 1, 2, 3
    table[4, 29] = 50
    case.edit(4, bad_words_ids=[[50, 60], [51, 61], [9], [1, 50, 62], [1, 1, 1, 63]], logit_bias={1: 5.0, 2: -0.1})
    case.edit(2, stop_ids=[7, 8], min_tokens=5, logit_bias={2: 100.0, 7: 3.0, VOCAB + 2: 1.0})
    case.edit(0, stop_ids=[7], min_tokens=5, bad_words_ids=[[4, 3, 5], [3, 6]])  # at its end; a word before the text
    got = case.check()
    forbidden = [row.isinf().nonzero()[:, 0].tolist() for row in got]
    assert forbidden == [[9, 60, 62], [7, 8], [9, 63], [6]]


def test_many_biases_and_words(triton_device):
    case = Case([0], [100], triton_device)
    words = [[i % 700, (i * 3) % 700, 10 + i % 600] for i in range(1500)]
    words += [[*case.batch.tokens[0, 98:100].tolist(), 650]]
    case.edit(0, logit_bias={i: i / 100 for i in range(690)}, bad_words_ids=words)
    assert case.check()[0, 650].isinf()


def test_rows_without_settings_keep_their_logits(triton_device):
    case = Case([0, 1, 2], [20, 2000, 30], triton_device, presence=[0.0, 1.0, 0.0])
    got = case.check()
    assert torch.equal(got[[0, 2]], case.logits[[0, 2]]) and not torch.equal(got[1], case.logits[1])


def test_logits_may_be_a_slice_of_a_padded_vocabulary(triton_device):
    from tokenmill.ops.triton.sample.shape import shape

    case = Case([1, 0], [300, 400], triton_device, repetition=1.5)
    padded = torch.full((2, VOCAB + 20), 7.0, device=triton_device)
    padded[:, :VOCAB] = case.logits
    shape(padded[:, :VOCAB], case.batch)
    assert torch.equal(padded[:, :VOCAB], case.shaped(shape)) and (padded[:, VOCAB:] == 7.0).all()


def test_masks_come_after_everything_else(triton_device):
    case = Case([1, 0], [300, 400], triton_device)
    case.edit(1, logit_bias={3: 50.0})
    words = (-(-VOCAB // 32) + 2) & ~1
    masks = np.zeros((2, words), dtype=np.int32)
    masks[1, :2] = 1, 1 << 4  # only token 4
    case.batch.masks = torch.from_numpy(masks).to(triton_device)
    got = case.check()
    assert got[0].isfinite().nonzero()[:, 0].tolist() == [4]
    assert torch.equal(got[1], case.logits[1])
