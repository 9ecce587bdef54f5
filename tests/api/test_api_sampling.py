"""Every field of SamplingParams does what it says, from the API down to the tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from api_engines import GREEDY, PROMPT, assert_idle, ids

from tokenmill import LLM, CompletionOutput, RequestOutput, SamplingParams

EOS = 2  # of the tiny model


def answer(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    return run(llm, prompt, **params).outputs[0]


def run(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    output = llm.generate([prompt], SamplingParams(**{"temperature": 0, "max_tokens": 30} | params), use_tqdm=False)[0]
    assert output.finished
    return output


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tiny: LLM, texter: LLM):
    yield
    for llm in (tiny, texter):
        llm.reset_prefix_cache()
        assert_idle(llm._processor.engine)


# Stopping


def test_a_stop_string_over_several_tokens_ends_the_answer_before_it(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True)
    for length in (1, 2, 5):  # letters, and so tokens
        stop = plain.text[10 : 10 + length]
        cut = plain.text.index(stop)
        output = answer(texter, "mill", ignore_eos=True, stop=[stop, "never said"])
        assert output.text == plain.text[:cut]
        assert output.finish_reason == "stop" and output.stop_reason == stop
        assert output.token_ids == plain.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) == cut + length  # tokens that spell the stop string are reported


def test_a_stop_string_can_be_kept(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True)
    stop = plain.text[8:11]
    output = answer(texter, "mill", ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert output.text == plain.text[: plain.text.index(stop) + 3] and output.text.endswith(stop)


def test_text_that_only_begins_like_a_stop_string_is_not_lost(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True)
    ending = plain.text[-3:] + "?!"  # the answer ends while it could still become this
    output = answer(texter, "mill", ignore_eos=True, stop=[ending])
    assert output.text == plain.text and output.finish_reason == "length" and output.stop_reason is None


def test_streams_never_show_a_part_of_a_stop_string(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True).text
    stop = plain[9:13]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    texts = [output.outputs[0].text for output in texter.stream("mill", params)]
    assert texts[-1] == plain[: plain.index(stop)]
    assert all(texts[-1].startswith(text) for text in texts)


def test_a_stop_string_on_the_last_token_counts_as_stop(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True)
    last = plain.text[:12]
    output = answer(texter, "mill", ignore_eos=True, max_tokens=12, stop=last)
    assert output.text == "" and output.finish_reason == "stop" and output.stop_reason == last


def test_a_stop_token_ends_the_answer_and_is_the_reason(tiny: LLM) -> None:
    plain = ids(tiny, PROMPT)
    stop = plain[7]
    output = answer(tiny, PROMPT, ignore_eos=True, stop_token_ids=[stop, 127])
    assert output.token_ids == plain[: plain.index(stop) + 1]
    assert output.finish_reason == "stop" and output.stop_reason == stop


def test_an_end_token_ends_the_answer_without_a_stop_reason(tiny: LLM) -> None:
    output = answer(tiny, PROMPT, logit_bias={EOS: 100})
    assert output.token_ids == [EOS] and output.finish_reason == "stop" and output.stop_reason is None


def test_ignore_eos_goes_on_after_an_end_token(tiny: LLM) -> None:
    output = answer(tiny, PROMPT, logit_bias={EOS: 100}, ignore_eos=True, max_tokens=5)
    assert output.token_ids == [EOS] * 5 and output.finish_reason == "length"
    named = answer(tiny, PROMPT, logit_bias={EOS: 100}, ignore_eos=True, stop_token_ids=[EOS])
    assert named.token_ids == [EOS] and named.stop_reason == EOS  # as a stop token it was asked for by name


def test_end_and_stop_tokens_wait_for_min_tokens(tiny: LLM) -> None:
    output = answer(tiny, PROMPT, logit_bias={EOS: 100, 7: 50}, stop_token_ids=[7], min_tokens=6)
    assert len(output.token_ids) == 7 and output.token_ids[-1] == EOS
    assert not {EOS, 7} & set(output.token_ids[:6])


def test_stop_strings_wait_for_min_tokens(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True)
    letter = next(letter for letter in plain.text[:10] if letter in plain.text[10:])
    output = answer(texter, "mill", ignore_eos=True, stop=letter, min_tokens=10)
    assert output.text == plain.text[: plain.text.index(letter, 10)] and output.stop_reason == letter
    place = next(i for i in range(2, 28) if plain.text[i - 1 : i + 1] not in plain.text[i:])
    across = plain.text[place - 1 : place + 1]  # begins in a token that may not stop, and does not come again
    assert answer(texter, "mill", ignore_eos=True, stop=across, min_tokens=place).text == plain.text
    assert answer(texter, "mill", ignore_eos=True, stop=across, min_tokens=place - 1).stop_reason == across


def test_without_max_tokens_an_answer_goes_on_to_the_models_length(tiny: LLM) -> None:
    output = run(tiny, PROMPT, max_tokens=None, ignore_eos=True)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 512
    assert output.outputs[0].finish_reason == "length"


def test_max_tokens_beyond_the_models_length_is_cut_to_it(tiny: LLM) -> None:
    assert len(answer(tiny, [7] * 500, max_tokens=100, ignore_eos=True).token_ids) == 12


def test_without_detokenize_there_are_tokens_and_no_text(texter: LLM) -> None:
    with_text = answer(texter, "mill", ignore_eos=True)
    without = answer(texter, "mill", ignore_eos=True, detokenize=False)
    assert without.token_ids == with_text.token_ids and without.text == "" and with_text.text


def test_special_tokens_are_shown_when_asked_for(texter: LLM) -> None:
    hidden = answer(texter, "mill", logit_bias={EOS: 100})
    shown = answer(texter, "mill", logit_bias={EOS: 100}, skip_special_tokens=False)
    assert hidden.text == "" and shown.text == "</s>"


# Several answers


def test_n_answers_differ_when_sampled_and_are_reproducible(tiny: LLM) -> None:
    first, second = (run(tiny, PROMPT, temperature=1.0, n=5, seed=3).outputs for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert [one.index for one in first] == [0, 1, 2, 3, 4]
    assert len({tuple(one.token_ids) for one in first}) > 1
    greedy = run(tiny, PROMPT, n=3, ignore_eos=True, max_tokens=12).outputs
    assert [one.token_ids for one in greedy] == [ids(tiny, PROMPT)] * 3


def test_the_first_of_n_answers_is_the_answer_without_n(tiny: LLM) -> None:
    alone = answer(tiny, PROMPT, temperature=1.0, seed=9)
    assert run(tiny, PROMPT, temperature=1.0, seed=9, n=4).outputs[0].token_ids == alone.token_ids


def test_more_answers_than_rows_all_come(tiny: LLM) -> None:
    outputs = run(tiny, PROMPT, temperature=1.0, n=20, max_tokens=9, ignore_eos=True).outputs
    assert [len(one.token_ids) for one in outputs] == [9] * 20


def test_each_of_n_answers_stops_on_its_own(texter: LLM) -> None:
    outputs = run(texter, "mill", temperature=1.5, n=6, seed=1, stop=["e", "a", "o"], max_tokens=60).outputs
    lengths = {len(one.token_ids) for one in outputs}
    assert len(lengths) > 1
    for one in outputs:
        assert one.finish_reason == "stop" or len(one.token_ids) == 60
        assert not set("eao") & set(one.text)


def test_best_of_returns_the_likeliest_answers_best_first(tiny: LLM) -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    all_six = run(tiny, PROMPT, n=6, logprobs=0, **fields).outputs
    best = run(tiny, PROMPT, n=2, best_of=6, **fields).outputs
    ranked = sorted(all_six, key=lambda one: -(one.cumulative_logprob or 0) / len(one.token_ids))
    assert [one.token_ids for one in best] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best] == [0, 1] and all(one.logprobs is None for one in best)


# Seeds


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(tiny: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "max_tokens": 20, "ignore_eos": True}
    seeded = SamplingParams(seed=1234, **fields)
    alone = ids(tiny, PROMPT, seeded)
    rng = random.Random(0)
    for company in (1, 5, 30):
        prompts = [[rng.randrange(3, 128) for _ in range(rng.randrange(1, 90))] for _ in range(company)]
        params = [SamplingParams(temperature=rng.choice([0, 0.7]), max_tokens=rng.randrange(1, 40)) for _ in prompts]
        place = rng.randrange(company + 1)
        prompts.insert(place, PROMPT)
        params.insert(place, seeded)
        assert tiny.generate(prompts, params, use_tqdm=False)[place].outputs[0].token_ids == alone
    assert ids(tiny, PROMPT, SamplingParams(seed=1235, **fields)) != alone


def test_without_a_seed_answers_differ(tiny: LLM) -> None:
    assert len({tuple(answer(tiny, PROMPT, temperature=1.0, ignore_eos=True).token_ids) for _ in range(4)}) > 1


# Logits


def test_logit_bias_forbids_and_forces(tiny: LLM) -> None:
    plain = answer(tiny, PROMPT, ignore_eos=True).token_ids
    without = answer(tiny, PROMPT, ignore_eos=True, logit_bias={plain[0]: -100})
    assert plain[0] not in without.token_ids
    assert answer(tiny, PROMPT, ignore_eos=True, logit_bias={"77": 100}).token_ids == [77] * 30


def test_bad_words_never_appear(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True)
    words = [plain.text[3:5], plain.text[0]]
    output = answer(texter, "mill", ignore_eos=True, bad_words=words)
    assert not any(word in output.text for word in words)
    unsaid = next(plain.text[0] + letter for letter in "abcdef" if plain.text[0] + letter not in plain.text)
    assert answer(texter, "mill", ignore_eos=True, bad_words=[unsaid]).text == plain.text


def test_top_k_of_one_is_greedy(tiny: LLM) -> None:
    output = answer(tiny, PROMPT, temperature=2.0, top_k=1, max_tokens=12, ignore_eos=True)
    assert output.token_ids == ids(tiny, PROMPT)


def test_penalties_change_repetition(tiny: LLM) -> None:
    def distinct(**params: Any) -> int:
        return len(set(answer(tiny, PROMPT, ignore_eos=True, max_tokens=100, **params).token_ids))

    plain = distinct()
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert distinct(**penalty) > plain, penalty


# Log-probabilities


def test_logprobs_come_with_rank_and_text(texter: LLM) -> None:
    output = answer(texter, "mill", logprobs=3, ignore_eos=True, max_tokens=6)
    assert output.logprobs is not None and len(output.logprobs) == 6
    for token, table in zip(output.token_ids, output.logprobs, strict=True):
        assert len(table) == 3 and table[token].rank == 1  # greedy
        assert [entry.rank for entry in table.values()] == [1, 2, 3]
        assert texter._processor.tokenizer is not None
        assert all(entry.decoded_token == texter._processor.tokenizer.decode([id]) for id, entry in table.items())
    assert output.cumulative_logprob == pytest.approx(
        sum(table[token].logprob for token, table in zip(output.token_ids, output.logprobs, strict=True))
    )


def test_a_chosen_token_that_is_not_among_the_best_is_added(tiny: LLM) -> None:
    output = answer(tiny, PROMPT, logprobs=2, logit_bias={99: 100}, max_tokens=3, ignore_eos=True)
    assert output.logprobs is not None and output.token_ids == [99] * 3
    for table in output.logprobs:
        assert 99 in table and len(table) in (2, 3)
        assert table[99].logprob < 0 and table[99].rank is not None  # as the model sees it, before the bias


def test_logprobs_end_where_a_stop_string_ends_the_answer(texter: LLM) -> None:
    plain = answer(texter, "mill", ignore_eos=True)
    output = answer(texter, "mill", ignore_eos=True, stop=plain.text[4:7], logprobs=0)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) < 30


def test_prompt_logprobs_are_the_same_in_chunks_and_after_a_cached_prefix(tiny: LLM) -> None:
    prompt = [(13 * i) % 120 + 3 for i in range(200)]  # over three steps of 64 tokens
    cold = run(tiny, prompt, prompt_logprobs=1, max_tokens=1)
    warm = run(tiny, prompt, prompt_logprobs=1, max_tokens=1)
    assert cold.prompt_logprobs is not None and len(cold.prompt_logprobs) == 200 and cold.prompt_logprobs[0] is None
    assert warm.prompt_logprobs == cold.prompt_logprobs
    for token, table in zip(prompt[1:], cold.prompt_logprobs[1:], strict=True):
        assert table is not None and token in table


# Prompts


def test_every_form_of_a_prompt_gives_the_same_answer(texter: LLM) -> None:
    tokens = run(texter, "mill").prompt_token_ids
    forms: list[Any] = ["mill", {"prompt": "mill"}, tokens, tuple(tokens), {"prompt_token_ids": tokens}]
    outputs = texter.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["mill", "mill", None, None, None]
    assert texter.generate(tokens, GREEDY, use_tqdm=False)[0].prompt_token_ids == tokens  # one prompt, not several
    assert texter.generate([], GREEDY, use_tqdm=False) == []


def test_a_chat_is_the_template_and_then_a_prompt(texter: LLM) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}; {% endfor %}"
    chat = [{"role": "user", "content": "hello"}]
    output = texter.chat(chat, GREEDY, use_tqdm=False, chat_template=template)[0]
    assert output.prompt_token_ids == texter.apply_chat_template(chat, chat_template=template)
    assert output.outputs[0].token_ids == ids(texter, "user: hello; ")
