"""Draft heads that attend to what their target has cached: what they see, and that training makes use of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import write_tiny

from tokenmill import LLM
from tokenmill.draft.attention import attend_anywhere, attend_in_windows
from tokenmill.draft.data import Texts
from tokenmill.draft.evaluate import acceptance
from tokenmill.draft.optimize import Schedule, Sizes, new_head, optimize
from tokenmill.draft.states import States, head_rows, runner_of, states_of
from tokenmill.draft.train import NO_LAYER, kv_layer_of, layer
from tokenmill.errors import ConfigError
from tokenmill.ops.reference import rotated

LAYER = 1


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = write_tiny(tmp_path_factory.mktemp("model"))
    with LLM(model, load_format="dummy", skip_tokenizer_init=True, device="cpu", seed=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def states(llm):
    """Of three texts of 9, 30 and 17 tokens, whose first tokens were written by nobody."""
    starts = torch.tensor([0, 9, 39, 56])
    texts = Texts(
        tokens=torch.randint(3, 128, (56,), generator=torch.Generator().manual_seed(0)).int(),
        starts=starts,
        questions=torch.tensor([[2, 4], [1, 1], [1, 5]]),
        answers=torch.tensor([[6, 9], [12, 30], [6, 17]]),
        temperatures=torch.zeros(3),
        seeds=torch.arange(3),
    )
    return states_of(llm._built, texts, LAYER)


def expected(llm, states, q, entries):
    """Entry by entry, over the keys of its text up to the token that was just read."""
    spec, decoder = llm._built.spec, runner_of(llm._built).decoder
    q = rotated(q.view(-1, spec.heads, spec.head_dim), decoder.rope_tables[LAYER], states.positions[entries])
    found = []
    for one, read in zip(q, states.read[entries].tolist(), strict=True):
        span = slice(int(states.begins[read]), read + 1)
        keys, values = (part[span].repeat_interleave(2, 1) for part in (states.keys, states.values))
        weights = (torch.einsum("hd,thd->ht", one, keys) * spec.attn_scale).softmax(-1)
        found.append(torch.einsum("ht,thd->hd", weights, values).flatten())
    return torch.stack(found)


def test_an_entry_sees_its_own_text_up_to_what_was_read(llm, states):
    decoder = runner_of(llm._built).decoder
    q = torch.randn(len(states), 32)
    entries = torch.arange(len(states))
    want = expected(llm, states, q, entries)
    torch.testing.assert_close(attend_anywhere(decoder, LAYER, states, entries)(q), want, rtol=1e-4, atol=1e-5)
    first = torch.tensor([9, 0])  # the middle text and what is behind it; then all
    window = torch.tensor([0] * (len(states) - 5) + [1] * 5)
    order = torch.cat([torch.arange(5, len(states)), torch.arange(5)])
    found = attend_in_windows(decoder, LAYER, states, order, window, first, 47)(q[order])
    torch.testing.assert_close(found, want[order], rtol=1e-4, atol=1e-5)


def test_keys_are_those_of_the_layer_whatever_was_computed_beside_them(llm, states):
    kept = states_of(llm._built, Texts(
        tokens=torch.randint(3, 128, (56,), generator=torch.Generator().manual_seed(0)).int()[9:39],
        starts=torch.tensor([0, 30]), questions=torch.tensor([[1, 1]]), answers=torch.tensor([[12, 30]]),
        temperatures=torch.zeros(1), seeds=torch.zeros(1, dtype=torch.int64),
    ), LAYER)  # fmt: skip
    torch.testing.assert_close(states.keys[9:39], kept.keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.values[9:39], kept.values, rtol=1e-4, atol=1e-5)
    other = states_of(llm._built, Texts(
        tokens=torch.arange(3, 12).int(), starts=torch.tensor([0, 9]), questions=torch.tensor([[1, 1]]),
        answers=torch.tensor([[2, 9]]), temperatures=torch.zeros(1), seeds=torch.zeros(1, dtype=torch.int64),
    ))  # fmt: skip
    assert other.keys is other.values is None


def secrets(llm, texts: int, length: int, seed: int) -> States:
    """Texts in which every other token is the text's own, which stands in the values and in no state before it."""
    decoder, spec = runner_of(llm._built).decoder, llm._built.spec
    random = torch.Generator().manual_seed(seed)
    secret = torch.randint(3, 35, (texts,), generator=random).repeat_interleave(length)
    tokens = torch.randint(3, 128, (texts * length,), generator=random)
    odd = torch.arange(texts * length) % 2 == 1
    rows = head_rows(decoder, torch.arange(spec.vocab_size))
    hidden = torch.randn(texts * length, spec.hidden, generator=random)
    hidden[odd] = 8 * torch.nn.functional.normalize(rows[secret[odd]], dim=-1)
    shape = (texts * length, spec.kv_heads, spec.head_dim)
    codes = torch.randn(spec.vocab_size, *shape[1:], generator=torch.Generator().manual_seed(0))
    place = torch.arange(length).repeat(texts)
    return States(
        hidden=hidden,
        tokens=torch.where(odd, secret, tokens),
        spans=torch.arange(texts).repeat_interleave(length),
        log_z=decoder.logits(hidden).logsumexp(-1),
        is_answer=torch.ones(texts * length, dtype=torch.bool),
        temperatures=torch.zeros(texts * length),
        seeds=torch.zeros(texts * length, dtype=torch.int64),
        positions=place + 1,
        read=torch.arange(texts * length),
        begins=torch.arange(texts * length) - place,
        keys=torch.randn(*shape, generator=random),
        values=codes[secret],
    )


def test_a_head_with_attention_learns_what_one_without_cannot(llm):
    decoder = runner_of(llm._built).decoder
    states, unseen = secrets(llm, 120, 24, seed=1), secrets(llm, 20, 24, seed=2)
    starts = torch.arange(0, len(unseen) - 2, 2)
    schedule = Schedule(steps=80, depths=1, batch=512, learning_rate=1e-2)
    ids, held = torch.arange(128, dtype=torch.int32), {}
    for kv_layer in (None, LAYER):
        head = new_head(decoder, states, ids, Sizes(32, 32), seed=0, kv_layer=kv_layer)
        head, _ = optimize(head, decoder, states, schedule, lambda text: None)
        held[kv_layer] = acceptance(head, decoder, unseen, starts, 1).held[0]
        assert acceptance(head.rounded(), decoder, unseen, starts, 1).held[0] > held[kv_layer] - 0.05
    assert held[None] < 0.2 and held[LAYER] > 0.8, held


def test_the_layer_is_what_was_asked_for_or_a_sentence(llm):
    spec = llm._built.spec
    assert kv_layer_of(spec, None) == 1 and kv_layer_of(spec, 0) == 0
    assert kv_layer_of(spec, layer("off")) is kv_layer_of(spec, layer("-1")) is None
    with pytest.raises(ConfigError, match="--kv-layer is 2, which caches no keys and values of the whole text; these"):
        kv_layer_of(spec, 2)
    with pytest.raises(ConfigError, match="--kv-layer is 'all'; write the number of a layer, or off"):
        layer("all")
    capped = replace(spec, attn_softcap=50.0)
    assert kv_layer_of(capped, None) is None and NO_LAYER == -1
    with pytest.raises(ConfigError, match="this model has none: use off"):
        kv_layer_of(capped, 1)
