"""DraftHead: what it computes, its file, and what it refuses to read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import TINY

from tokenmill.errors import ModelError
from tokenmill.model.draft_head import EPS, DraftHead, Target, default_kv_layer, fingerprint
from tokenmill.model.families import spec_from_config

SPEC = spec_from_config(TINY)
FINAL_NORM = torch.linspace(0.5, 1.5, SPEC.hidden)
HIDDEN, STATE, INNER, DRAFTS = SPEC.hidden, 24, 40, 20


def a_head(**changes) -> DraftHead:
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    head = DraftHead(
        enter_norm=drawn(HIDDEN),
        enter_weight=drawn(STATE, HIDDEN),
        mix_norm=drawn(STATE + HIDDEN),
        gate_up_weight=drawn(2 * INNER, STATE + HIDDEN),
        down_weight=drawn(STATE, INNER),
        norm2=drawn(STATE),
        gate_up2_weight=drawn(2 * INNER, STATE),
        down2_weight=drawn(STATE, INNER),
        out_norm=drawn(STATE),
        head_weight=drawn(DRAFTS, STATE),
        ids=torch.arange(0, 2 * DRAFTS, 2, dtype=torch.int32),
        target=Target.of(SPEC, FINAL_NORM),
        recipe={"tokens": 12, "seed": 3},
    )
    return replace(head, **changes)


class Swiglu(torch.nn.Module):
    def __init__(self, norm, gate_up, down):
        super().__init__()
        self.norm = torch.nn.RMSNorm(len(norm), eps=EPS)
        self.norm.weight.data = norm
        self.gate, self.up, self.down = (
            torch.nn.Linear(*one.shape[::-1], bias=False) for one in (*gate_up.chunk(2), down)
        )
        for module, weight in zip((self.gate, self.up, self.down), (*gate_up.chunk(2), down), strict=True):
            module.weight.data = weight

    def forward(self, x):
        x = self.norm(x)
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def test_a_chain_of_drafts_is_what_modules_of_torch_compute():
    head, hidden, embeddings = a_head(), torch.randn(3, HIDDEN), torch.randn(2, 3, HIDDEN)
    mixer = Swiglu(head.mix_norm, head.gate_up_weight, head.down_weight)
    second = Swiglu(head.norm2, head.gate_up2_weight, head.down2_weight)
    state = torch.nn.functional.rms_norm(hidden, (HIDDEN,), head.enter_norm, EPS) @ head.enter_weight.T
    ours = head.enter(hidden)
    for embedding in embeddings:
        state = state + mixer(torch.cat([state, embedding], -1))
        state = state + second(state)
        ours = head.step(ours, embedding)
    logits = torch.nn.functional.rms_norm(state, (STATE,), head.out_norm, EPS) @ head.head_weight.T
    torch.testing.assert_close(head.logits(ours), logits, rtol=1e-4, atol=1e-4)


def an_attending_head(**changes) -> DraftHead:
    random = torch.Generator().manual_seed(2)
    width = SPEC.heads * SPEC.head_dim
    weights = {
        "attention_norm": torch.randn(STATE, generator=random),
        "q_weight": torch.randn(width, STATE, generator=random),
        "o_weight": torch.randn(STATE, width, generator=random),
    }
    return a_head(kv_layer=1, **weights | changes)


def test_attention_stands_between_the_two_mlps():
    head, hidden, embedding = an_attending_head(), torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    mixer = Swiglu(head.mix_norm, head.gate_up_weight, head.down_weight)
    second = Swiglu(head.norm2, head.gate_up2_weight, head.down2_weight)
    state = head.enter(hidden)
    ours = head.step(state, embedding, lambda q: q.sin())
    state = state + mixer(torch.cat([state, embedding], -1))
    queries = torch.nn.functional.rms_norm(state, (STATE,), head.attention_norm, EPS) @ head.q_weight.T
    state = state + queries.sin() @ head.o_weight.T
    torch.testing.assert_close(ours, state + second(state), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({"num_hidden_layers": 30}, 20),
        ({"num_hidden_layers": 2}, 1),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}, None),
    ],
)
def test_a_head_attends_to_a_layer_that_sees_the_whole_text(changes, layer):
    assert default_kv_layer(spec_from_config(TINY | changes)) == layer


def test_a_head_of_the_first_version_is_one_without_attention(tmp_path):
    path = tmp_path / "head.safetensors"
    a_head().save(path)
    with safe_open(path, framework="pt") as file:
        tensors, told = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    del told["kv_layer"]
    save_file(tensors, path, told | {"version": "1"})
    back = DraftHead.load(path, SPEC, FINAL_NORM)
    assert back.kv_layer is back.q_weight is back.o_weight is back.attention_norm is None


@pytest.mark.parametrize("made", [a_head, an_attending_head])
def test_a_head_comes_back_from_its_file_with_weights_of_eight_bits(tmp_path, made):
    head, path = made(), tmp_path / "head.safetensors"
    head.save(path)
    back = DraftHead.load(path, SPEC, FINAL_NORM)
    for name, one in head.rounded().tensors().items():
        assert torch.equal(getattr(back, name), one), name
        near = head.tensors()[name].abs().amax(-1, keepdim=True) / 254
        assert (one - head.tensors()[name]).abs().le(near + 1e-6).all()
    assert torch.equal(back.ids, head.ids)
    assert (back.target, back.recipe, back.kv_layer) == (head.target, head.recipe, head.kv_layer)
    assert back.tensors().keys() == head.tensors().keys()
    assert path.stat().st_size < sum(one.numel() for one in head.tensors().values()) + 8192
    assert [one.name for one in tmp_path.iterdir()] == ["head.safetensors"]


def test_a_head_that_was_read_stays_as_it_is_though_its_file_is_written_over(tmp_path):
    path, other = tmp_path / "head", tmp_path / "other"
    a_head().save(path)
    a_head(enter_norm=torch.zeros(HIDDEN), ids=torch.arange(DRAFTS, dtype=torch.int32)).save(other)
    head = DraftHead.load(path, SPEC, FINAL_NORM)
    with path.open("r+b") as file:  # the same file: not another one of the same name
        file.write(other.read_bytes())
    assert torch.equal(head.enter_norm, a_head().enter_norm) and torch.equal(head.ids, a_head().ids)


def test_a_fingerprint_is_of_the_model_not_of_the_dtype_that_it_runs_in():
    norm = FINAL_NORM.bfloat16()
    assert fingerprint(norm) == fingerprint(norm.float())
    assert fingerprint(norm) != fingerprint(norm * 1.1)


def changed(path, tensors=None, **metadata):
    """Write the file at `path` again with other tensors (None: without) and metadata."""
    with safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()} | (tensors or {})  # noqa: SIM118
        told = file.metadata() | metadata
    save_file({name: one for name, one in kept.items() if one is not None}, path, told)


def nothing(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


def text(path):
    path.write_text("a head")


def with_nan(path):
    changed(path, {"gate_up.scale": torch.full((2 * INNER,), float("nan"))})


def with_inf(path):
    changed(path, {"mix_norm": torch.full((STATE + HIDDEN,), float("inf"))})


def of_another_target(**values):
    def change(path):
        with safe_open(path, framework="pt") as file:
            target = json.loads(file.metadata()["target"])
        changed(path, target=json.dumps(target | values))

    return change


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (nothing, "there is no draft head at"),
        (cut, "truncated"),
        (text, "truncated, or no safetensors file"),
        (lambda path: changed(path, format="other"), "is no draft head: its format is 'other'"),
        (lambda path: changed(path, version="3"), "version '3', and this is version 2"),
        (lambda path: changed(path, target="{}"), "does not say which model"),
        (lambda path: changed(path, target="no json"), "does not say which model"),
        (lambda path: changed(path, recipe="[]"), "does not say which model"),
        (of_another_target(hidden=64), "hidden width 64, and this one's is 32"),
        (of_another_target(hidden="64"), "does not say which model"),
        (of_another_target(vocab=256), "vocabulary of 256 tokens, and this model has 128"),
        (of_another_target(layers=3), "another model"),
        (of_another_target(architecture="Other"), "another model"),
        (of_another_target(fingerprint="0" * 64), "another model"),
        (lambda path: changed(path, {"ids": torch.full((DRAFTS,), 128, dtype=torch.int32)}), "outside the vocabulary"),
        (lambda path: changed(path, {"ids": torch.full((DRAFTS,), -1, dtype=torch.int32)}), "outside the vocabulary"),
        (with_nan, "gate_up_weight that are NaN or infinite"),
        (with_inf, "mix_norm that are NaN or infinite"),
        (lambda path: changed(path, {"down2.weight": None}), "lacks down2.weight"),
        (lambda path: changed(path, {"down2.scale": None}), "lacks down2.weight"),
        (lambda path: changed(path, {"ids": None, "norm2": None}), "lacks norm2, ids"),
        (lambda path: changed(path, {"out_norm": torch.ones(STATE + 1)}), "of shape"),
        (lambda path: changed(path, {"ids": torch.arange(5, dtype=torch.int32)}), "of shape"),
        (lambda path: changed(path, kv_layer="2"), "attends to layer 2, which in this model has no keys and values"),
        (lambda path: changed(path, kv_layer='"1"'), "kv_layer is no number"),
        (lambda path: changed(path, {"o.weight": None}), "lacks o.weight"),
        (lambda path: changed(path, {"attention_norm": torch.ones(STATE + 1)}), "attention_norm of shape"),
        (lambda path: changed(path, {"q.scale": torch.full((HIDDEN,), float("nan"))}), "q_weight that are NaN"),
    ],
)
def test_a_file_that_is_no_head_for_this_model_is_refused_in_a_sentence(tmp_path, damage, sentence):
    path = tmp_path / "head.safetensors"
    an_attending_head().save(path)
    damage(path)
    with pytest.raises(ModelError, match=sentence) as refusal:
        DraftHead.load(path, SPEC, FINAL_NORM)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)
