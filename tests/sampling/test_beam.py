"""Beam search chooses what transformers' beam search chooses, and ends when it ends."""

from random import Random

import pytest
import torch

from tokenmill.sampling.beam import BeamGroup

transformers = pytest.importorskip("transformers")
VOCAB = 40
EOS = [3, 7]


def tiny_model(seed, spread=0.35):
    """Sharp enough that beams differ, flat enough that stops come up."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[0, 1, 2])
def model(request):
    return tiny_model(request.param)


def ours(model, prompt, width, num_return, length_penalty, early_stopping, stop_ids, max_new_tokens):
    group = BeamGroup(width, num_return, length_penalty, early_stopping, frozenset(stop_ids), max_new_tokens)
    beams = [[]]
    rounds = 0
    while beams:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + beam for beam in beams])).logits[:, -1].float()
        top = logits.log_softmax(-1).topk(2 * width + len(stop_ids))
        candidates = [
            list(zip(i, v, strict=True)) for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        beams = [[*beams[parent], token] for parent, token in group.advance(candidates)]
        rounds += 1
    assert group.done and rounds <= max_new_tokens
    return group.results()


def theirs(model, prompt, width, num_return, length_penalty, early_stopping, stop_ids, max_new_tokens):
    result = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=num_return,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (result.beam_indices >= 0).sum(-1).tolist()
    tokens = [
        row[len(prompt) : len(prompt) + length] for row, length in zip(result.sequences.tolist(), lengths, strict=True)
    ]
    return tokens, result.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.0])
@pytest.mark.parametrize("width,num_return,stop_ids", [(2, 1, EOS[:1]), (4, 4, EOS[:1]), (4, 2, EOS), (3, 3, [])])
def test_beams_equal_transformers_token_for_token(model, width, num_return, stop_ids, length_penalty, early_stopping):
    for prompt in ([5, 9, 11], [1, 2, 30, 31]):
        settings = (width, num_return, length_penalty, early_stopping, stop_ids, 14)
        expected, scores = theirs(model, prompt, *settings)
        found = ours(model, prompt, *settings)
        assert [hypothesis.tokens for hypothesis in found] == expected
        assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, rel=1e-5)
        for hypothesis in found:
            assert hypothesis.finished_by_stop == (hypothesis.tokens[-1] in stop_ids)


@pytest.mark.parametrize("seed", [102, 107, 111, 120])
def test_random_settings_equal_transformers(seed):
    random = Random(seed)
    model = tiny_model(seed, random.choice([0.15, 0.25, 0.35]))
    for _ in range(8):
        width = random.randint(2, 6)
        stop_ids = random.sample(range(1, VOCAB), random.choice([1, 2, 3, 6]))
        settings = (width, random.randint(1, width), random.choice([-1.0, 0.0, 0.5, 1.0, 2.0]), random.random() < 0.5)
        settings += (stop_ids, random.randint(1, 20))
        prompt = [random.randrange(1, VOCAB) for _ in range(random.randint(1, 6))]  # 0 would be padding to transformers
        assert [h.tokens for h in ours(model, prompt, *settings)] == theirs(model, prompt, *settings)[0], settings


def test_some_searches_end_before_the_limit(model):
    """Otherwise the comparison above would say nothing about the ends."""
    prompts = [[token] for token in range(10, 30)]
    found = [ours(model, prompt, 2, 1, 1.0, True, EOS, 14)[0] for prompt in prompts]
    assert any(hypothesis.finished_by_stop for hypothesis in found)


def test_first_round_starts_from_the_prompt_alone():
    group = BeamGroup(2, 2, 1.0, False, frozenset({0}), 5)
    assert group.advance([[(1, -0.1), (2, -0.2), (3, -0.3), (0, -9.0)]]) == [(0, 1), (0, 2)]


def test_stop_outside_the_best_width_is_not_a_hypothesis():
    group = BeamGroup(1, 1, 1.0, False, frozenset({0}), 5)
    assert group.advance([[(1, -0.1), (0, -0.2)]]) == [(0, 1)]
    assert [hypothesis.tokens for hypothesis in group.results()] == [[1]]  # the live beam, not the stop


def test_search_goes_on_while_a_live_beam_may_still_win():
    group = BeamGroup(1, 1, 0.0, False, frozenset({0}), 9)
    assert group.advance([[(0, -3.0), (5, -3.5)]]) == []  # the live beam is already worse than the finished one
    assert group.results()[0].tokens == [0]
    eager = BeamGroup(1, 1, 3.0, False, frozenset({0}), 9)
    assert eager.advance([[(7, -1.0), (0, -3.0)]]) == [(0, 7)]


def test_search_compares_with_the_worst_finished_beam():
    group = BeamGroup(2, 2, 0.0, False, frozenset({0}), 9)
    assert group.advance([[(0, -1.0), (5, -1.2), (6, -5.0)]]) == [(0, 5), (0, 6)]
    # Finished are now -1.0 and -2.2; the live beam at -1.5 can still replace the second.
    assert group.advance([[(7, -0.3), (0, -1.0), (8, -9.0)], [(7, -9.0), (8, -9.5), (0, -9.9)]])[0] == (0, 7)
    # And now the best live one, at -3.5, cannot.
    assert group.advance([[(7, -2.0), (8, -3.0), (0, -9.0)], [(7, -9.0), (8, -9.5), (0, -9.9)]]) == []
    assert [hypothesis.tokens for hypothesis in group.results()] == [[0], [5, 0]]


def test_limit_finishes_every_beam():
    group = BeamGroup(2, 2, 1.0, False, frozenset({0}), 1)
    assert group.advance([[(4, -0.5), (0, -0.7), (6, -1.0)]]) == []
    assert [(h.tokens, h.finished_by_stop) for h in group.results()] == [([4], False), ([0], True)]


def test_results_of_an_unfinished_search_are_its_live_beams():
    group = BeamGroup(2, 2, 1.0, False, frozenset(), 5)
    group.advance([[(1, -0.1), (2, -0.2), (3, -0.3)]])
    assert [hypothesis.tokens for hypothesis in group.results()] == [[1], [2]]
    assert not group.done


def test_candidates_for_a_wrong_number_of_beams_are_refused():
    with pytest.raises(ValueError, match="1 live beams, but candidates for 2"):
        BeamGroup(2, 2, 1.0, False, frozenset(), 5).advance([[(1, 0.0)], [(2, 0.0)]])
