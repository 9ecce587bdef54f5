"""Training of draft heads: the texts, the hidden states, the loss, and what a few seconds of it are good for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny import write_tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.cli.app import app
from tokenmill.draft.data import (
    ANSWER_TEMPERATURES,
    LOOP,
    Frame,
    Prompts,
    Texts,
    _Writer,
    draft_vocabulary,
    frame_of,
    loop_start,
    write_texts,
)
from tokenmill.draft.evaluate import _per_step, acceptance, evaluate
from tokenmill.draft.loss import draft_loss
from tokenmill.draft.optimize import Batches, Schedule, Sizes, new_head, optimize
from tokenmill.draft.states import embeddings, head_rows, logits_parts, runner_of, states_of
from tokenmill.draft.train import TrainOptions, count, main, train_draft
from tokenmill.errors import ConfigError, ModelError
from tokenmill.model.draft_head import DraftHead, fingerprint
from tokenmill.ops.noise import gumbel_noise

TOKENS = 6000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With a tokenizer for the words w0, w1, ... and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    words = {f"w{number}": number for number in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "w1 w5 {{ messages[0].content }} w6 w7 w8"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return write_tiny(folder)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, load_format="dummy", skip_tokenizer_init=True, device="cpu", seed=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(llm):
    return write_texts(llm, llm._built.spec, TOKENS, seed=1, max_len=128, tell=lambda text: None)


@pytest.fixture(scope="module")
def states(llm, texts):
    return states_of(llm._built, texts)


def test_texts_without_a_template_begin_with_bos_and_all_else_is_written(texts, llm):
    assert texts.num_written >= TOKENS
    assert len(texts.tokens) == texts.num_written + len(texts)
    assert (texts.tokens[texts.starts[:-1]] == llm._built.spec.bos_id).all()
    assert (texts.questions[:, 1] == texts.answers[:, 0]).all()
    assert set(texts.temperatures.tolist()) == {float(torch.tensor(one)) for one in ANSWER_TEMPERATURES}


def test_texts_with_a_template_are_questions_and_answers_in_its_frame(model):
    with LLM(model, load_format="dummy", device="cpu") as llm:
        texts = write_texts(llm, llm._built.spec, 1500, seed=1, max_len=128, tell=lambda text: None)
    passages, about = [], []
    for one in range(len(texts)):
        text = texts.part(one, one + 1)
        tokens, (first, last), (begin, end) = text.tokens.tolist(), text.questions[0].tolist(), text.answers[0].tolist()
        assert tokens[last:begin] == [6, 7, 8] and end == len(tokens) <= 128 and 2 not in tokens[begin : end - 1]
        if first == last:  # about what another text says, of which nothing is written here
            assert tokens[:2] == [1, 5]
            about.append(tokens[2:first])
            continue
        passages.append(tokens[begin:end])
        assert tokens[:2] == [1, 5] and not any(tokens[2:first])  # words of an opening, which this model has not
        assert 4 <= last - 2 <= 203 and 2 not in tokens[first:last]
    assert len(passages) // 4 <= len(about) <= len(passages)
    said = {tuple(one[at : at + 16]) for one in passages for at in range(len(one) - 15)}
    assert all(any(tuple(tokens[at : at + 16]) in said for at in range(len(tokens))) for tokens in about)


def test_texts_are_what_the_model_says_again(texts, llm):
    one = int((texts.temperatures == 1.0).nonzero()[0])
    text = texts.part(one, one + 1)
    begin = int(text.answers[0, 0])
    params = SamplingParams(temperature=1.0, seed=int(text.seeds[0]), max_tokens=20, detokenize=False)
    again = llm.generate([text.tokens[:begin].tolist()], params, use_tqdm=False)[0].outputs[0].token_ids
    assert list(again) == text.tokens[begin : begin + 20].tolist()


def test_texts_of_the_same_seed_are_the_same(llm):
    spec = llm._built.spec
    first, again = (write_texts(llm, spec, 500, seed=1, max_len=128, tell=lambda text: None) for _ in range(2))
    assert torch.equal(first.seeds[:4], again.seeds[:4])
    same = [torch.equal(first.part(i, i + 1).tokens, again.part(i, i + 1).tokens) for i in range(4)]
    assert sum(same) >= 3  # a prefix hit may break a tie
    other = write_texts(llm, spec, 500, seed=2, max_len=128, tell=lambda text: None)
    assert not torch.equal(first.seeds[:4], other.seeds[:4])


def test_states_are_those_that_the_tokens_were_sampled_from(states, llm):
    decoder = runner_of(llm._built).decoder
    logits = torch.cat([part for _, part in logits_parts(decoder, states.hidden)])
    torch.testing.assert_close(states.log_z, logits.logsumexp(-1))
    greedy = states.temperatures == 0
    noise = gumbel_noise(states.seeds, states.positions, logits.shape[1])
    sampled = (logits / states.temperatures.clamp_min(0.1)[:, None] + noise).argmax(-1)
    chosen = torch.where(greedy, logits.argmax(-1), sampled)
    same = (chosen == states.tokens)[states.is_answer]
    assert same.float().mean() > 0.999  # products of other shapes may break a tie


def test_questions_and_answers_have_states_and_what_stands_between_them_has_none(llm):
    frame = 3, 2  # tokens before the question, and between it and the answer
    lengths = [(5, 7), (4, 1)]
    texts = Texts(
        tokens=torch.cat([torch.arange(sum(frame) + sum(one)) + 10 * row for row, one in enumerate(lengths)]).int(),
        starts=torch.tensor([0, 17, 27]),
        questions=torch.tensor([[3, 8], [3, 7]]),
        answers=torch.tensor([[10, 17], [9, 10]]),
        temperatures=torch.tensor([0.0, 1.0]),
        seeds=torch.tensor([5, 6]),
    )
    states = states_of(llm._built, texts)
    assert states.tokens.tolist() == [*range(3, 8), *range(10, 17), *range(13, 17), 19]
    assert states.is_answer.tolist() == [False] * 5 + [True] * 7 + [False] * 4 + [True]
    assert states.spans.tolist() == [0] * 5 + [1] * 7 + [2] * 4 + [3]
    assert states.positions.tolist() == [*range(3, 8), *range(10, 17), *range(3, 7), 9]
    assert texts.answer_counts(128).nonzero()[:, 0].tolist() == [*range(10, 17), 19]
    alone = states_of(llm._built, texts.part(1, 2))  # another row's text changes nothing
    torch.testing.assert_close(alone.hidden, states.hidden[12:], rtol=1e-4, atol=1e-4)


def test_a_chat_template_is_cut_where_the_users_text_stands(llm):
    class Chat:
        chat_template = "{{ bos_token }}<user>{{ messages[0].content }}</user><model>"
        bos_token, eos_token, bos_id = "<s>", "</s>", 1

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [ord(letter) for letter in text]

    frame = frame_of(Chat(), llm._built.spec)
    assert frame == Frame([ord(one) for one in "<s><user>"], [ord(one) for one in "</user><model>"])
    assert frame_of(None, llm._built.spec) == Frame([1], [])
    Chat.chat_template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}.{% endfor %}<model>"
    frame = frame_of(Chat(), llm._built.spec)
    parts = ["".join(map(chr, part)) for part in (frame.before, frame.between, frame.again)]
    assert parts == ["<user>", ".<model>", ".<user>"]


def test_questions_begin_as_told_and_others_are_about_passages_or_go_on_after_an_answer(llm):
    frame, prompts = Frame([1, 5], [6, 7], [8, 9, 8]), Prompts([[10, 11]], [[12, 12]], [[13, 13]])
    rows = list(_Writer(llm, frame, 1, 512, prompts).write(48))
    assert len(rows) > 40
    own = [row for row in rows if row.question[0] < row.question[1]]
    opened = [row for row in own if row.question[0] == 4]
    assert len(own) // 3 < len(opened) < len(own)
    assert all(row.tokens[2:4] == [10, 11] for row in opened)
    talks = [row for row in rows if row not in own]
    answers = [row.tokens[: row.answer[1] - 1] for row in own]
    behind = [8, 9, 8, 13, 13, 6, 7]
    second = [row for row in talks if row.tokens[row.answer[0] - 7 : row.answer[0]] == behind]
    assert second and all(row.tokens[: row.answer[0] - 7] in answers for row in second)
    about = [row for row in talks if row not in second]
    instructed = [row for row in about if row.tokens[2:4] == [12, 12]]
    assert len(about) // 3 < len(instructed) < len(about)  # behind other passages there is a question
    questions = [tuple(row.tokens[slice(*row.question)]) for row in own]
    for row in about:
        asked = row.tokens[2 : row.answer[0] - 2]
        assert row in instructed or any(tuple(asked[-len(one) :]) == one for one in questions)
        assert row.question[0] == row.question[1] and len(row.tokens) <= 512


def test_the_draft_vocabulary_has_the_commonest_tokens_and_all_that_end_a_text(texts, llm):
    counts = texts.answer_counts(128)
    rarest = int(counts.argmin())
    ids = draft_vocabulary(texts, llm._built.spec, [rarest], 10)
    commonest = counts.argsort(descending=True, stable=True)[:9].tolist()
    assert ids.tolist() == sorted([rarest, *commonest]) and ids.dtype == torch.int32
    assert len(draft_vocabulary(texts, llm._built.spec, [], 1000)) == 128


def test_a_text_ends_where_it_begins_to_go_in_circles():
    once = list(range(40))
    assert loop_start(once) == 40
    assert loop_start(once * 2) == 80
    assert loop_start(once * 3) == loop_start(once * 9) == 80
    assert loop_start([1, 2] * 100) == 4
    assert loop_start([*once, *once, *once[: LOOP - 1]]) == 80 + LOOP - 1
    assert loop_start([]) == 0


def test_texts_come_back_from_their_file_and_only_for_their_model(texts, llm, tmp_path):
    path, spec = tmp_path / "texts.safetensors", llm._built.spec
    texts.save(path, "mark")
    assert torch.equal(Texts.load(path, spec, "mark").tokens, texts.tokens)
    with pytest.raises(ModelError, match="written by another model"):
        Texts.load(path, spec, "other mark")
    path.write_text("nothing")
    with pytest.raises(ModelError, match="holds no generated texts"):
        Texts.load(path, spec, "mark")


def test_the_loss_and_its_gradient_are_those_of_cross_entropy_and_of_chances(monkeypatch):
    monkeypatch.setattr("tokenmill.draft.loss.PROBABILITY_BYTES", 4 * 5 * 11)  # five rows at a time
    x = torch.randn(13, 7, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(11, 7, requires_grad=True)
    target, share = torch.randn(13, 14).softmax(-1)[:, :11], torch.rand(13)
    sampled, warm = torch.randint(0, 11, (13,)), torch.arange(13) % 2 > 0
    sampled[3] = sampled[4] = -1
    logs = (x @ weight.T).log_softmax(-1)
    at, known = sampled.clamp_min(0)[:, None], sampled >= 0
    ratios = logs.exp() / logs.exp().gather(1, at)
    sums = torch.maximum(target, ratios * target.gather(1, at)).sum(-1) + 1 - target.sum(-1)
    sums = torch.where(warm, sums, ratios.sum(-1))
    plain = ((-0.3 * (target * logs).sum(-1) + 1.7 * known * sums.log()) * share).sum()
    expected = torch.autograd.grad(plain / 2, (x, weight))
    loss, chances = draft_loss(x, weight, target, sampled, warm, share, 0.3, 1.7)
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chances, known / sums, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(loss / 2, (x, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_chance_of_a_draft_is_how_often_it_is_what_the_target_samples_with_the_same_noise():
    torch.manual_seed(0)
    target, x, weight = (1.5 * torch.randn(1, 11)).softmax(-1), torch.randn(1, 7), torch.randn(11, 7)
    noise = gumbel_noise(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64), 11)
    tokens, drafts = ((logits + noise).argmax(-1) for logits in (target.log(), x @ weight.T))
    one = torch.ones(1)
    for token in target[0].topk(4).indices:
        _, chance = draft_loss(x, weight, target, token[None], one > 0, one, 1.0, 1.0)
        assert float(chance) == pytest.approx(float((drafts[tokens == token] == token).float().mean()), abs=0.02)
        _, chance = draft_loss(x, weight, target, token[None], one < 0, one, 1.0, 1.0)  # without noise
        assert float(chance) == pytest.approx(float((x @ weight.T).softmax(-1)[0, token]), rel=1e-3)


def test_rows_of_the_head_and_embeddings_are_those_of_the_model(llm):
    decoder = runner_of(llm._built).decoder
    ids, hidden = torch.tensor([5, 3, 99]), torch.randn(4, 32)
    torch.testing.assert_close(hidden @ head_rows(decoder, ids).T, decoder.logits(hidden)[:, ids], rtol=1e-3, atol=1e-3)
    assert torch.equal(embeddings(decoder, ids[None])[0], decoder.weights.embedding(ids))


def test_targets_are_the_models_probabilities_of_what_can_be_drafted(tmp_path):
    """Of a model that scales its embeddings and caps its logits."""
    gemma = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 8}
    gemma |= {"final_logit_softcapping": 3.0, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    folder = write_tiny(tmp_path / "model", **gemma, sliding_window=64)
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cpu") as llm:
        decoder, spec = runner_of(llm._built).decoder, llm._built.spec
        assert spec.embed_scale != 1 and spec.logit_softcap == 3.0
        texts = write_texts(llm, spec, 200, seed=1, max_len=64, tell=lambda text: None)
        states = states_of(llm._built, texts)
        ids = draft_vocabulary(texts, spec, spec.eos_ids, 40)
        head = new_head(decoder, states, ids, Sizes(spec.hidden, 16), seed=0)
        found = Batches(head, decoder, states, Schedule())._targets(states.hidden, states.log_z)
        expected = decoder.logits(states.hidden).softmax(-1)[:, ids.long()]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        token = states.tokens[:1]
        assert torch.equal(embeddings(decoder, token), decoder.weights.embedding(token) * decoder._embed_scale)


def test_training_makes_a_head_that_agrees_with_its_target(llm, texts, states):
    decoder, spec = runner_of(llm._built).decoder, llm._built.spec
    ids = draft_vocabulary(texts, spec, spec.eos_ids, 100)
    schedule = Schedule(steps=120, depths=3, batch=512, learning_rate=1e-2)
    head = new_head(decoder, states, ids, Sizes(spec.hidden, 64), seed=0)
    lines: list[str] = []
    trained, told = optimize(head, decoder, states, schedule, lines.append)
    assert told["steps"] == 120 and told["losses"][-1] < told["losses"][0]
    assert "loss" in lines[-1]
    before, after = evaluate(head, decoder, states, 3), evaluate(trained, decoder, states, 3)
    assert set(after) == {"greedy", "sampled", "coupled"}
    for kind, gain in (("greedy", 0.1), ("coupled", 0.03)):
        found = after[kind]
        assert found.held[0] > before[kind].held[0] + gain, kind
        assert found.lengths == sorted(found.lengths) and 1 <= found.lengths[0] <= 2
    assert not any(one.requires_grad for one in trained.tensors().values())
    assert after["coupled"].held[0] > 2 * after["sampled"].held[0]


def test_training_of_the_same_seed_gives_the_same_head(llm, texts, states):
    decoder, spec = runner_of(llm._built).decoder, llm._built.spec
    head = new_head(decoder, states, draft_vocabulary(texts, spec, (), 50), Sizes(16, 24), seed=0)  # a narrow state
    first, again = (optimize(head, decoder, states, Schedule(steps=3, batch=256), lambda text: None)[0] for _ in "12")
    assert torch.equal(first.head_weight, again.head_weight)
    assert not torch.equal(first.head_weight, head.head_weight)


def test_acceptance_counts_chains_of_drafts(llm, states):
    """A head that knows the answer: its state is the number of drafts, and the token is looked up by hand."""
    decoder = runner_of(llm._built).decoder
    start = int((states.spans[:-3] == states.spans[3:]).nonzero()[0])
    right = states.tokens[start + 1 : start + 4].tolist()

    class Known:
        kv_layer = None

        def __init__(self, tokens):
            self.tokens, self.ids, self.depth = tokens, torch.arange(128, dtype=torch.int32), 0

        def enter(self, hidden):
            self.depth = 0
            return hidden

        def step(self, state, embedding, attend):
            self.depth += 1
            return state

        def logits(self, state):
            return torch.nn.functional.one_hot(torch.tensor([self.tokens[self.depth - 1]]), 128).float()

    at = torch.tensor([start])
    assert acceptance(Known(right), decoder, states, at, 3).lengths == [2.0, 3.0, 4.0]
    wrong = [right[0], (right[1] + 1) % 128, right[2]]
    found = acceptance(Known(wrong), decoder, states, at, 3)
    assert (found.held, found.lengths) == ([1.0, 0.0, 0.0], [2.0, 2.0, 2.0])


def test_tokens_per_step_are_those_of_steps_behind_each_other():
    assert _per_step([0, 1, 2, 3], [3, 0, 0, 0]) == 4.0  # one step goes over all
    assert _per_step([0, 1, 2, 3], [0, 1, 4, 0]) == 1.333  # 1, 2 and 1 tokens: no step begins at 2
    assert _per_step([0, 1, 7, 8], [4, 4, 0, 1]) == 2.667  # another answer begins at 7: 5, 1 and 2 tokens
    assert _per_step([], []) == 0.0


def test_the_command_writes_a_head_for_the_model(model, tmp_path, capsys):
    out, data = tmp_path / "head.safetensors", tmp_path / "texts.safetensors"
    words = [model, "--out", str(out), "--data", str(data), "--tokens", "1k", "--steps", "5", "--inner", "32"]
    words += ["--vocabulary", "64", "--batch", "128", "--device", "cpu", "--load-format", "dummy", "--depths", "2"]
    main(words)
    printed = capsys.readouterr().out
    assert "as stored greedy" in printed and "TFLOP" in printed
    with LLM(model, load_format="dummy", device="cpu", skip_tokenizer_init=True) as llm:
        norm = runner_of(llm._built).decoder.weights.final_norm
        head = DraftHead.load(out, llm._built.spec, norm)
    assert head.target.fingerprint == fingerprint(norm)
    assert len(head.ids) == 64 and head.recipe["training"]["steps"] == 5
    assert len(head.recipe["acceptance"]["greedy"]["lengths"]) == 2
    main(words)
    assert f"from {data}" in capsys.readouterr().out


def test_a_head_is_kept_though_its_judgement_fails(model, tmp_path, monkeypatch):
    calls = []

    def fails_after_training(*given, **options):
        calls.append(given)
        if len(calls) > 1:
            raise RuntimeError("no memory")
        return {}

    monkeypatch.setattr("tokenmill.draft.train.evaluate", fails_after_training)
    options = TrainOptions(
        model, tmp_path / "head.safetensors", tokens=1000, inner=32, vocabulary=64, load_format="dummy"
    )
    with pytest.raises(RuntimeError):
        train_draft(replace(options, schedule=Schedule(steps=2, batch=128)), lambda text: None)
    assert options.out.exists()


@pytest.mark.parametrize(("text", "number"), [("20000", 20000), ("20k", 20000), ("1.5M", 1500000)])
def test_a_number_of_tokens_may_be_short(text, number):
    assert count(text) == number


def test_what_cannot_be_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="no number of tokens"):
        count("many")
    with pytest.raises(ConfigError, match="--tokens is 0"):
        train_draft(TrainOptions("missing", tmp_path / "head", tokens=0), lambda text: None)
    with pytest.raises(ConfigError, match="no such folder"):
        train_draft(TrainOptions("missing", tmp_path / "none" / "head"), lambda text: None)


def test_the_cli_trains_too(model, tmp_path):
    out = tmp_path / "head.safetensors"
    words = ["train-draft", model, "-o", str(out), "--tokens", "1k", "--steps", "2", "--inner", "32", "--batch", "128"]
    result = CliRunner().invoke(app, [*words, "--vocabulary", "64", "--device", "cpu", "--load-format", "dummy"])
    assert result.exit_code == 0, result.output
    assert out.exists() and f"a draft head for {model} is in {out}" in result.output
    assert "it writes 1,000 tokens itself, then training takes 2 steps; a CPU is slow" in result.output
    result = CliRunner().invoke(app, ["train-draft", model, "-o", str(tmp_path / "none" / "head")])
    assert result.exit_code == 2 and "cannot be written" in result.output
