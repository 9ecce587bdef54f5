"""The sampler applies each row's settings to that row alone, without waiting for the device."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill.engine.step import Admission
from tokenmill.ops import cpu, reference, shaping
from tokenmill.ops.types import LOGPROB_BUCKETS
from tokenmill.params import SamplingParams
from tokenmill.sampling import sampler
from tokenmill.sampling.logprobs import unpack
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.settings import Traits

transformers = pytest.importorskip("transformers")
VOCAB = 50
ROWS = 12
LENGTH = 40


class Bench:
    """A sampler over a random token table; `shaped` are the logits that the sampling op got to see."""

    def __init__(self, op=reference.sample, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=self.random, dtype=torch.int32)
        self.op = op
        ops = SimpleNamespace(sample=self._sample, logprobs=reference.logprobs, shape=shaping.shape)
        self.sampler = Sampler(ops, ROWS, VOCAB, "cpu", self.tokens, max_verified=8)

    def _sample(self, logits, batch):
        self.shaped, self.batch = logits.clone(), batch
        return self.op(logits, batch)

    def admit(self, *rows, prompt_len=10, stop_ids=(), **settings):
        params = SamplingParams(**{"max_tokens": 100, **settings})
        self.sampler.admit(
            [Admission(row, self.tokens[row, :prompt_len].tolist(), prompt_len, params, 7 + row, list(stop_ids))
             for row in rows]
        )  # fmt: skip

    def sample(self, rows, positions, logits=None):
        logits = self.logits(len(rows)) if logits is None else logits
        traits = self.sampler.traits(rows)
        return self.sampler.sample(logits.clone(), torch.tensor(rows), torch.tensor(positions), traits)

    def logprobs(self, rows, positions, logits=None):
        """What the rows that asked are told."""
        sampled = self.sample(rows, positions, logits)
        return [one for one in unpack(sampled.logprobs.numpy(), self.sampler.widths(rows)) if one is not None]

    def logits(self, n):
        return torch.randn(n, VOCAB, generator=self.random) * 3


@pytest.mark.parametrize(("most", "threads"), [(1 << 20, 1), (0, 3)])
def test_few_logits_are_sampled_by_one_thread(most, threads, monkeypatch):
    """Torch's team of threads would take turns with that of the native library."""
    before, seen = torch.get_num_threads(), []

    def failing(logits, batch):
        seen.append(torch.get_num_threads())
        raise RuntimeError("as it may")

    monkeypatch.setattr(sampler, "SMALL", most)
    bench = Bench(failing)
    bench.admit(0, temperature=1.0)
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="as it may"):
            bench.sample([0], [10])
        assert seen == [threads] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_equals_transformers(penalty):
    bench = Bench()
    bench.admit(3, 4, repetition_penalty=penalty)
    logits = bench.logits(2)
    bench.sample([4, 3], [20, 33], logits)
    for i, (row, position) in enumerate([(4, 20), (3, 33)]):
        known = bench.tokens[row : row + 1, :position].long()
        expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(known, logits[i : i + 1].clone())
        torch.testing.assert_close(bench.shaped[i : i + 1], expected)


def test_presence_and_frequency_count_the_output_only():
    bench = Bench()
    bench.admit(5, presence_penalty=0.7, frequency_penalty=-0.4, prompt_len=12)
    logits = bench.logits(1)
    bench.sample([5], [30], logits)
    output = bench.tokens[5, 12:30].tolist()
    expected = [logits[0, token].item() - 0.7 * (token in output) + 0.4 * output.count(token) for token in range(VOCAB)]
    assert bench.shaped[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_bad_words_equal_transformers():
    bench = Bench()
    table = bench.tokens[2].tolist()
    position = 25
    last = table[position - 3 : position]
    words = [[9], [last[-1], 11], [*last[-2:], 11], [*last, 13]]
    words += [[(last[-1] + 1) % VOCAB, 12], [48, 49, 14], list(range(30))]  # these must not match
    params = SamplingParams(bad_words_ids=words)
    bench.sampler.admit([Admission(2, table[:10], 10, params, 0, [])])
    logits = bench.logits(1)
    bench.sample([2], [position], logits)
    expected = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=None)(
        bench.tokens[2:3, :position].long(), logits.clone()
    )
    torch.testing.assert_close(bench.shaped, expected)
    assert expected[0].isinf().nonzero()[:, 0].tolist() == [9, 11, 13]


def test_bad_words_longer_than_the_text_do_not_match():
    bench = Bench()
    bench.admit(0, bad_words_ids=[list(range(20)), [7]], prompt_len=2)
    bench.sample([0], [2])
    assert bench.shaped[0].isinf().nonzero()[:, 0].tolist() == [7]


def test_stop_tokens_are_forbidden_until_min_tokens():
    bench = Bench()
    bench.admit(1, min_tokens=3, stop_ids=[4, 6], prompt_len=10)
    for position, forbidden in ((10, True), (12, True), (13, False)):
        bench.sample([1], [position])
        assert bench.shaped[0].isinf().nonzero()[:, 0].tolist() == ([4, 6] if forbidden else [])
    processor = transformers.MinNewTokensLengthLogitsProcessor(10, 3, [4, 6], device="cpu")
    logits = bench.logits(1)
    bench.sample([1], [12], logits)
    torch.testing.assert_close(bench.shaped, processor(bench.tokens[1:2, :12].long(), logits.clone()))


def test_logit_bias_is_added_after_penalties():
    bench = Bench()
    first = int(bench.tokens[0, 0])
    other = (first + 1) % VOCAB
    bench.admit(0, logit_bias={first: 5.0, other: -100.0, VOCAB + 3: 1.0}, repetition_penalty=2.0)
    logits = torch.full((1, VOCAB), 3.0)
    bench.sample([0], [1], logits)
    assert bench.shaped[0, first] == 3.0 / 2.0 + 5.0
    assert bench.shaped[0, other] == 3.0 - 100.0


def test_rows_without_penalties_keep_their_logits():
    bench = Bench()
    bench.admit(0, 1)
    bench.admit(2, repetition_penalty=2.0, logit_bias={1: 4.0}, bad_words_ids=[[3]])
    logits = bench.logits(4)
    bench.sample([0, 2, 1, 2], [15, 15, 15, 16], logits)
    assert torch.equal(bench.shaped[[0, 2]], logits[[0, 2]])
    assert not torch.equal(bench.shaped[[1, 3]], logits[[1, 3]])


def test_draft_positions_see_only_the_tokens_before_them():
    bench = Bench()
    bench.admit(6, 7, repetition_penalty=1.7, presence_penalty=1.0, frequency_penalty=0.5, bad_words_ids=[[1, 2], [3]])
    logits = bench.logits(5)
    rows, positions = [6, 6, 6, 7, 6], [20, 21, 22, 15, 23]
    together = bench.sample(rows, positions, logits)
    shaped = bench.shaped
    later = bench.tokens.clone()
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        bench.tokens[row, position:] = -1  # nothing from here on may matter
        alone = bench.sample([row], [position], logits[i : i + 1])
        assert torch.equal(bench.shaped[0], shaped[i])
        assert alone.tokens.tolist() == together.tokens[i : i + 1].tolist()
        bench.tokens.copy_(later)


def test_penalties_in_slices_equal_penalties_at_once(monkeypatch):
    bench = Bench()
    bench.admit(*range(ROWS), repetition_penalty=1.4, frequency_penalty=0.3)
    logits, rows = bench.logits(ROWS), list(range(ROWS))
    bench.sample(rows, [30] * ROWS, logits)
    whole = bench.shaped
    monkeypatch.setattr(shaping, "PENALTY_SCRATCH", 1)
    bench.sample(rows, [30] * ROWS, logits)
    assert torch.equal(bench.shaped, whole)


def test_a_failed_token_in_the_table_does_not_break_penalties():
    bench = Bench()
    bench.admit(0, repetition_penalty=2.0)
    bench.tokens[0, 5] = -1
    bench.tokens[0, 6] = VOCAB + 9
    assert bench.sample([0], [10]).tokens.item() >= 0


@pytest.mark.parametrize("op", [reference.sample, cpu.sample], ids=["reference", "cpu"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where,poison", [(17, float("nan")), (17, float("inf")), (slice(None), float("-inf"))])
def test_broken_logits_give_minus_one_and_leave_other_rows_alone(op, temperature, where, poison):
    bench = Bench(op)
    bench.admit(0, 1, 2, temperature=temperature, top_k=5, logprobs=2)
    logits = bench.logits(3)
    healthy = bench.sample([0, 1, 2], [11, 12, 13], logits).tokens.tolist()
    logits[1, where] = poison
    broken = bench.sample([0, 1, 2], [11, 12, 13], logits).tokens.tolist()
    assert min(healthy) >= 0
    assert broken == [healthy[0], -1, healthy[2]]


@pytest.mark.parametrize("op", [reference.sample, cpu.sample], ids=["reference", "cpu"])
def test_a_seed_gives_the_same_tokens_whatever_row_and_batch(op):
    bench = Bench(op)
    params = SamplingParams(temperature=1.2, top_k=30, top_p=0.95, repetition_penalty=1.2)
    logits = bench.logits(3)
    bench.tokens[9] = bench.tokens[4]
    table = bench.tokens[4, :10].tolist()
    bench.admit(0, 1, temperature=0.5, min_p=0.2)
    bench.sampler.admit([Admission(4, table, 10, params, 99, [])])
    alone = bench.sample([4], [14], logits[2:]).tokens.item()
    bench.sampler.admit([Admission(9, table, 10, params, 99, [])])
    assert bench.sample([1, 0, 9], [30, 12, 14], logits).tokens[2].item() == alone
    assert bench.sample([9, 1], [14, 5], logits[[2, 0]]).tokens[0].item() == alone


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_every_64_bit_seed_is_accepted(seed):
    bench = Bench()
    bench.sampler.admit([Admission(0, [1], 1, SamplingParams(), seed, [])])
    bench.sample([0], [1])
    assert bench.batch.seed.item() % 2**64 == seed % 2**64


def test_settings_reach_the_sampling_op():
    bench = Bench()
    bench.admit(2, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125)
    bench.admit(7, temperature=0.0, top_k=10**12)
    bench.sample([7, 2], [11, 12])
    batch = bench.batch
    assert batch.temperature.tolist() == [0.0, 0.5]
    assert batch.top_k.tolist() == [VOCAB, 3]
    assert batch.top_p.tolist() == [1.0, 0.25]
    assert batch.min_p.tolist() == [0.0, 0.125]
    assert batch.position.tolist() == [11, 12]
    assert batch.any_filter and not batch.all_greedy
    assert all(t.is_contiguous() for t in (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed))
    bench.sample([7], [11])
    assert bench.batch.all_greedy and not bench.batch.any_filter  # a greedy row needs no filter


def test_a_new_request_in_a_row_forgets_the_old_one():
    bench = Bench()
    bench.admit(3, logit_bias={1: 9.0}, bad_words_ids=[[2]], repetition_penalty=3.0, min_tokens=5, logprobs=3)
    bench.admit(3)
    logits = bench.logits(1)
    assert bench.sample([3], [11], logits).logprobs is None
    assert torch.equal(bench.shaped, logits)


def test_admission_costs_one_copy(monkeypatch):
    bench = Bench()
    copies = []
    to_device = Sampler._to_device
    monkeypatch.setattr(Sampler, "_to_device", lambda self, words: copies.append(1) or to_device(self, words))
    bench.admit(0, 1, 2, 3, logit_bias={3: 1.0}, bad_words_ids=[[1, 2]], min_tokens=2, stop_ids=[5])
    assert len(copies) == 1
    bench.sample([0, 1], [10, 10])
    assert len(copies) == 1


class Watch(TorchDispatchMode):
    """Counts the operations, and refuses those that would wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.WAITS, f"{name} waits for the device"
        if name.startswith("index"):
            indices = args[1] if isinstance(args[1], (list, tuple)) else []
            assert not any(i is not None and i.dtype == torch.bool for i in indices), "boolean indexing waits"
        self.calls.append(name)
        return func(*args, **(kwargs or {}))


def test_sampling_never_waits_for_the_device():
    """What the ops themselves do is theirs: those for a CPU may look, those for a GPU may not."""
    bench = Bench()
    bench.sampler.ops.shape = lambda logits, batch: logits.add_(1)
    bench.sampler.ops.logprobs = lambda logits, tokens, widths, k: torch.zeros(len(tokens), 3 + 2 * k)
    bench.admit(0, 1, temperature=0.7, top_p=0.9)
    bench.admit(2, repetition_penalty=1.3, bad_words_ids=[[1, 2], [3]], logit_bias={1: 2.0}, logprobs=3)
    bench.admit(3, min_tokens=4, stop_ids=[7])
    with Watch():
        bench.sample([0, 1, 2, 3], [10, 10, 10, 10])


def test_plain_rows_cost_few_operations():
    bench = Bench(op=lambda logits, batch: torch.zeros(len(logits), dtype=torch.int64))
    bench.admit(*range(ROWS), temperature=0.0)
    rows = list(range(ROWS))
    arguments = (bench.logits(ROWS), torch.arange(ROWS), torch.full((ROWS,), 10), bench.sampler.traits(rows))
    with Watch() as watch:
        bench.sampler.sample(*arguments)
    free = ("view", "select", "clone", "unbind", "detach")
    assert len([name for name in watch.calls if name not in free]) <= 4, watch.calls


def test_logprobs_are_taken_before_penalties_and_temperature():
    bench = Bench()
    bench.admit(0, temperature=0.0)
    bench.admit(1, temperature=0.3, logprobs=4, repetition_penalty=5.0, logit_bias={8: 50.0})
    bench.admit(2, temperature=1.5, logprobs=0)
    logits = bench.logits(3)
    result = bench.sample([0, 1, 2], [11, 11, 11], logits)
    nothing, *found = unpack(result.logprobs.numpy(), bench.sampler.widths([0, 1, 2]))
    assert nothing is None
    assert result.logprobs[:, 0].tolist() == result.tokens.tolist()
    raw = logits.log_softmax(-1)
    for entry, row in zip(found, (1, 2), strict=True):
        token = result.tokens[row].item()
        assert entry.token == token
        assert entry.logprob == pytest.approx(raw[row, token].item())
        assert entry.rank == 1 + int((raw[row] > raw[row, token]).sum())
    assert found[0].token == 8  # the bias decided, and the rank still tells the model's opinion
    best = raw[1].topk(4)
    assert found[0].top == list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert found[1].top == []


def test_beams_are_greedy_and_get_enough_candidates():
    bench = Bench()
    bench.admit(0, beam_width=4, n=2, stop_ids=[1, 2, 3], temperature=1.0)
    bench.admit(1, beam_width=40, n=1, logprobs=1)
    wide, all_of_them = bench.logprobs([0, 1], [10, 10])
    assert bench.batch.all_greedy
    assert len(wide.top) == 2 * 4 + 3
    assert len(all_of_them.top) == VOCAB


def test_best_of_gets_the_chosen_logprobs():
    bench = Bench()
    bench.admit(0, best_of=4, n=2)
    (found,) = bench.logprobs([0], [10])
    assert found.top == [] and found.logprob < 0


def test_prompt_logprobs_are_those_of_the_given_tokens():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    targets = torch.tensor([3, 1, 4, 1, 5, 9], dtype=torch.int32)
    found = unpack(Bench().sampler.prompt_logprobs(logits, targets, 2).numpy(), np.full(6, 2))
    raw = logits.log_softmax(-1)
    assert [entry.token for entry in found] == targets.tolist()
    for i, entry in enumerate(found):
        assert entry.logprob == pytest.approx(raw[i, targets[i]].item())
        assert [token for token, _ in entry.top] == raw[i].topk(2).indices.tolist()


def test_double_precision_logits_are_accepted():
    bench = Bench()
    bench.admit(0, 1, repetition_penalty=1.5, logit_bias={1: 1.0}, bad_words_ids=[[2]], top_p=0.9, logprobs=2)
    logits = bench.logits(2).double()
    result = bench.sample([0, 1], [10, 10], logits)
    told = unpack(result.logprobs.numpy(), bench.sampler.widths([0, 1]))
    assert [one.logprob for one in told] == logits.log_softmax(-1).gather(1, result.tokens[:, None])[:, 0].tolist()


def packed(tokens, words=(VOCAB + 31) // 32):
    bits = np.zeros(32 * words, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("words", [1, 2, 5], ids=["too few", "as many", "too many"])
def test_a_grammar_leaves_only_what_it_allows(words):
    """Its vocabulary may be smaller or larger than the model's; a token that it does not know is not allowed."""
    bench = Bench()
    bench.admit(3, 5, structured={"regex": "a"}, logprobs=1)
    bench.admit(4, repetition_penalty=1.5)
    bench.sampler.take_masks({5: [packed([7, 30, 31], words)], 3: [packed([0], words)]})
    logits = bench.logits(3)
    logits[2, 31] = 40.0
    sampled = bench.sample([3, 4, 5], [15, 15, 15], logits)
    finite = [row.isfinite().nonzero()[:, 0].tolist() for row in bench.shaped]
    assert finite == [[0], list(range(VOCAB)), [7, 30, 31]]
    assert sampled.tokens.tolist()[0] == 0 and sampled.tokens.tolist()[2] == 31
    expected = logits.log_softmax(-1)
    told = unpack(sampled.logprobs.numpy(), bench.sampler.widths([3, 4, 5]))
    assert told[0].logprob == pytest.approx(expected[0, 0].item())  # what the model thought of it


def test_a_new_request_in_a_row_forgets_the_old_grammar():
    bench = Bench()
    bench.admit(3, structured={"regex": "a"})
    bench.admit(4, structured={"regex": "a"})
    bench.sampler.take_masks({3: [packed([7])], 4: [packed([9])]})
    bench.admit(3)
    logits = bench.logits(2)
    bench.sample([3, 4], [11, 11], logits)
    assert torch.equal(bench.shaped[0], logits[0])
    assert bench.shaped[1].isfinite().nonzero()[:, 0].tolist() == [9]


def test_masks_cost_one_copy(monkeypatch):
    bench = Bench()
    bench.admit(0, 1, 2, structured={"regex": "a"})
    copies = []
    to_device = Sampler._to_device
    monkeypatch.setattr(Sampler, "_to_device", lambda self, words: copies.append(1) or to_device(self, words))
    bench.sampler.take_masks({0: [packed([1])], 1: [packed([2])], 2: [packed([3])]})
    assert bench.sample([0, 1, 2], [10, 10, 10]).tokens.tolist() == [1, 2, 3]
    assert len(copies) == 1


def test_drafts_are_sampled_under_masks_of_their_own():
    """Two rows with drafts, one with a grammar and no drafts, one with drafts and no grammar."""
    bench = Bench()
    bench.admit(2, 3, 7, structured={"regex": "a"}, temperature=0.0)
    bench.admit(4, temperature=0.0, repetition_penalty=1.1)
    allowed = {3: [7, 8, 9], 2: [5], 7: [1, 2]}
    bench.sampler.take_masks({row: [packed([token]) for token in tokens] for row, tokens in allowed.items()})
    rows, numbers = [2, 3, 3, 3, 4, 4, 7, 7], [0, 0, 1, 2, 0, 1, 0, 1]
    mask_rows = bench.sampler.mask_rows(np.array(rows), np.array(numbers))
    assert sorted(set(mask_rows)) == [2, 3, 4, 7, *range(ROWS + 1, ROWS + 4)]
    positions = torch.tensor([15 + number for number in numbers])
    logits, traits = bench.logits(8), bench.sampler.traits(rows)
    free = bench.sampler.sample(logits[4:6].clone(), torch.tensor([4, 4]), positions[4:6], traits).tokens.tolist()
    sampled = bench.sampler.sample(logits.clone(), torch.tensor(rows), positions, traits, torch.from_numpy(mask_rows))
    assert sampled.tokens.tolist() == [5, 7, 8, 9, *free, 1, 2]
    bench.sampler.take_masks({3: [packed([6])]})  # places of drafts are free again
    assert bench.sampler.mask_rows(np.array([3, 3]), np.array([0, 1])).tolist() == [3, 3]


def test_traits_say_what_any_of_the_rows_needs():
    bench = Bench()
    bench.admit(0, temperature=0.0)
    bench.admit(1, temperature=0.8)
    bench.admit(2, temperature=0.8, top_k=5)
    bench.admit(3, temperature=0.0, logprobs=3)
    for row, settings in enumerate(({"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"min_tokens": 2},
                                    {"bad_words_ids": [[1]]}, {"structured": {"regex": "a"}}), start=4):  # fmt: skip
        bench.admit(row, temperature=0.0, stop_ids=[3], **settings)
        assert bench.sampler.traits([0, row]) == Traits(shaped=True)
    assert bench.sampler.traits([0, 0]) == Traits()
    assert bench.sampler.traits([0, 1]) == Traits(warm=True)
    assert bench.sampler.traits([2, 1, 0]) == Traits(warm=True, filtered=True)
    assert bench.sampler.traits([0, 3]) == Traits(best=3)
    assert bench.sampler.widths([3, 0, 3]).tolist() == [3, -1, 3]


def test_log_probabilities_have_room_for_one_of_few_numbers_of_best_tokens_on_a_gpu():
    sampler = Bench().sampler
    sampler.device = torch.device("cuda")
    assert [sampler._room(width) for width in (0, 1, 5, 8, 9, 20, 32)] == [8, 8, 8, 8, 32, 32, 32]
    assert sampler._room(40) == 40 and not sampler.recordable(Traits(best=40))
    assert set(LOGPROB_BUCKETS) == {8, 32}


def test_every_variant_can_be_rehearsed_and_changes_nothing():
    bench = Bench()
    variants = bench.sampler.variants()
    assert len(set(variants)) == len(variants) == 18 and all(map(bench.sampler.recordable, variants))
    bench.admit(0, repetition_penalty=1.5, temperature=0.7, logprobs=2)
    logits = bench.logits(3)
    before = bench.sample([0], [20], logits[:1])
    for traits in variants:
        sampled = bench.sampler.rehearse(logits.clone(), traits)
        assert sampled.tokens.tolist() == logits.argmax(-1).tolist()  # padding is greedy
        assert (sampled.logprobs is not None) == (traits.best is not None)
    after = bench.sample([0], [20], logits[:1])
    assert after.tokens.equal(before.tokens) and after.logprobs.equal(before.logprobs)


def test_shaped_logits_in_half_precision_are_widened_first():
    """Penalties and biases are smaller than the steps between a model's logits in 16 bits."""
    bench = Bench()
    bench.admit(0, temperature=0.0, logit_bias={4: 0.01, 5: 0.02}, logprobs=1)
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, [4, 5]] = 16.0
    sampled = bench.sample([0], [20], logits)
    assert sampled.tokens.tolist() == [5] and bench.shaped.dtype == torch.float32
    told = unpack(sampled.logprobs.numpy(), bench.sampler.widths([0]))[0]
    assert told.rank == 1 and told.logprob == pytest.approx(logits.float().log_softmax(-1)[0, 5].item())


def test_edits_of_many_rows_lie_where_the_device_looks_for_them():
    """The addresses are those of the words that the rows' edits are cut from."""
    bench = Bench()
    bench.admit(1, logit_bias={3: 1.0, 9: -2.0})
    bench.admit(0, 2, 3, min_tokens=3, stop_ids=[5, 6])
    bench.admit(4)
    at = bench.sampler._edits_at.tolist()
    assert at[4] == 0 and all(at[:4])
    for row in range(4):
        first = bench.sampler._edits[row].bias_ids if row == 1 else bench.sampler._edits[row].stop_ids
        assert first.data_ptr() == at[row] + 8 * 4
    bench.admit(1)
    assert bench.sampler._edits_at[1] == 0 and 1 not in bench.sampler._edits


def test_tables_for_shaping_are_there_before_anything_is_recorded(monkeypatch):
    """On a GPU a step may be recorded the first time it runs: it must not make what outlives it."""
    bench = Bench()
    made = []
    monkeypatch.setattr(Sampler, "_make_tables", lambda self: made.append(1))
    bench.admit(0, logprobs=2)
    assert not made
    for settings in ({"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"structured": {"regex": "a"}}):
        bench.admit(1, 2, **settings)
    assert len(made) == 3
    bench.sampler.rehearse(bench.logits(2), Traits(shaped=True))
    bench.sampler.rehearse(bench.logits(2), Traits(warm=True, best=8))
    assert len(made) == 4
