"""EAGLE-3 heads: read as their own tools write them, drafting what their own code computes, refused in a sentence."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY, write_tiny
from tiny_drafts import drafted, made_eagle, make_drafts_free, permuting

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation import eagle
from tokenmill.engine.speculation.eagle import EagleProposer, EagleRunner
from tokenmill.engine.speculation.head_runner import Behind, single_queries
from tokenmill.errors import ModelError
from tokenmill.model.decoder import Features, TokenBatch
from tokenmill.model.eagle import FILE, EagleHead, is_eagle
from tokenmill.model.families import spec_from_config
from tokenmill.ops.types import AttentionBatch

DATA = Path(__file__).parent / "data"
HEADS = ["eagle3_llama", "eagle3_qwen3", "eagle3_biased"]
SHAPE = {"num_hidden_layers": 4}
SPEC = spec_from_config(TINY | SHAPE)
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8, "max_model_len": 128,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [3 + (7 * i + j) % (5 + i) for j in range(6 + 9 * i)]} for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("model"), **SHAPE)


def renamed(folder: Path, embedding: bool = True) -> Path:
    """The library's head in the naming of SafeAILab and SpecForge, as its own converter reads that."""
    folder.mkdir()
    tensors = load_file(DATA / "eagle3_llama" / FILE)
    if not embedding:
        del tensors["embed_tokens.weight"]
    save_file({name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}, folder / FILE)
    config = json.loads((DATA / "eagle3_llama/config.json").read_text())
    flat = config["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(flat))
    return folder


def changed(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a head with another config or other tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = json.loads((DATA / "eagle3_llama/config.json").read_text())
    tensors = load_file(DATA / "eagle3_llama" / FILE)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / FILE)
    return folder


def runner_of(llm: LLM) -> EagleRunner:
    speculation = llm._built.engine.speculation
    assert speculation is not None
    (proposer,) = (one for one in speculation.proposers if one.name == "head")
    assert isinstance(proposer, EagleProposer)
    return proposer._head


@pytest.mark.parametrize("ops", [None, "reference"])
@pytest.mark.parametrize("name", [*HEADS, "renamed"])
@torch.inference_mode()
def test_the_layer_computes_what_the_library_does(model: str, tmp_path: Path, name: str, ops: str | None) -> None:
    """The first draft behind every token of a text, and two more behind the tokens that do come next."""
    folder = renamed(tmp_path / "renamed") if name == "renamed" else DATA / name
    expected = load_file(DATA / ("eagle3_llama" if name == "renamed" else name) / "expected.safetensors")
    features, ids, logits = expected["features"], expected["ids"], expected["logits"]
    with LLM(model, **OPTIONS, speculation=f"head:{folder}", ops=ops) as llm:
        runner = runner_of(llm)
        state, count = runner.state, 18
        state.block_tables[0, :4] = torch.tensor([3, 1, 2, 0])
        rows, positions = torch.zeros(count, dtype=torch.int32), torch.arange(count)
        slots = state.slots(rows, positions)
        found = runner.run(runner.enter(features[:count]), ids[:count], positions, slots, whole(state, count))
        torch.testing.assert_close(runner.logits(found), logits[0, :count], rtol=2e-5, atol=2e-5)
        going = found[-1:]
        for depth in (1, 2):
            at = count - 1 + depth
            context = torch.tensor([at + 1], dtype=torch.int32)
            each = torch.arange(2, dtype=torch.int32)
            behind = Behind(torch.tensor([at]), single_queries(state, rows[:1], context, each, ([0], [at + 1])))
            going, said = runner.step(going, ids[at : at + 1], behind)
            torch.testing.assert_close(said[0], logits[depth, count - 1], rtol=2e-5, atol=2e-5)


RUNS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunked": {"max_num_batched_tokens": 20},
    "preempted": {"kv_cache_memory": 14 * (4096 + 2048), "max_num_seqs": 4},
    "cached": {"enable_prefix_caching": True},
    "plain steps": {"cuda_graphs": False},
}


@pytest.mark.parametrize("run", RUNS)
def test_drafts_are_what_the_head_says_of_the_whole_text(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """Whatever was read in chunks, verified and rejected, forked, preempted or found in the cache."""
    make_drafts_free(monkeypatch)
    monkeypatch.setattr(eagle, "LEAST", 0.0)  # chains of full length
    folder = made_eagle(tmp_path / "head", TINY | SHAPE, [1, 3, 2])
    said: dict[tuple[int, ...], list[int]] = {}
    propose = EagleProposer.propose

    def noted(self: EagleProposer, requests: Any, length: int) -> Any:
        drafts = propose(self, requests, length)
        said.update({tuple(one.tokens): draft.tokens for one, draft in zip(requests, drafts, strict=True) if draft})
        return drafts

    monkeypatch.setattr(EagleProposer, "propose", noted)
    options = OPTIONS | {"enable_prefix_caching": False} | RUNS[run]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, n=1 if run == "cached" else 2)
    with LLM(model, **options, speculation=f"head:{folder}") as llm:
        for _ in range(2):
            llm.generate(PROMPTS, params, use_tqdm=False)
        scheduler = llm._built.engine.scheduler
        assert run != "preempted" or scheduler.stats.preemptions
        assert run != "cached" or scheduler.kv.stats.hit
        recorded = llm._built.engine.runner._recorded  # type: ignore[attr-defined]
        assert run == "plain steps" or recorded._graph is not None
        runner = runner_of(llm)
        assert len(said) > 60 and sum(map(len, said.values())) > 3.5 * len(said)
        texts = sorted(said)[::7]
        for text in texts:
            assert said[text] == chain(llm, runner, text)[: len(said[text])]


@torch.inference_mode()
def chain(llm: LLM, runner: EagleRunner, text: tuple[int, ...]) -> list[int]:
    """Greedy drafts behind a text, computed anew from its first token to its last."""
    model = llm._built.engine.runner
    assert isinstance(model, TorchRunner)
    tables, count = model.state, len(text) - 1
    blocks = tables.block_tables.shape[1]
    tables.block_tables[0] = torch.arange(blocks).int()  # nobody else is there any more
    rows, positions = torch.zeros(count, dtype=torch.int32), torch.arange(count)
    ids, slots = torch.tensor(text), tables.slots(torch.zeros(count, dtype=torch.int32), positions)
    features = Features(runner.head.layers, torch.empty(count, len(runner.head.layers) * SPEC.hidden))
    batch = whole(tables, count)
    model.decoder.forward(TokenBatch(ids[:-1], positions, slots, batch, features=features), tables.kv)
    state = runner.run(runner.enter(features.states), ids[1:], positions, slots, whole(tables, count))[-1:]
    found, logits = [], runner.logits(state)
    for depth in range(runner.length):
        found.append(int(runner.ids[logits.argmax()]))
        at = count + depth
        context, each = torch.tensor([at + 1], dtype=torch.int32), torch.arange(2, dtype=torch.int32)
        behind = Behind(torch.tensor([at]), single_queries(tables, rows[:1], context, each, ([0], [at + 1])))
        state, logits = runner.step(state, torch.tensor(found[-1:]), behind)
    return found


def whole(tables: DeviceState, count: int) -> AttentionBatch:
    """One text from its first token on, in row 0."""
    rows, context = torch.tensor([0], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    starts = torch.tensor([0, count], dtype=torch.int32)
    return AttentionBatch(rows, starts, context, tables.block_tables, 0, count, count, [0], [count], [count])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_knows_its_target_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """A model that says after each token a certain other one, and a head that finds this in its own embeddings."""
    make_drafts_free(monkeypatch)
    target, folder = permuting(tmp_path)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + i, *range(5, 5 + 7 * i)]} for i in range(4)]
    found = []
    for speculation in ("off", f"head:{folder}"):
        options = {name: one for name, one in OPTIONS.items() if name != "load_format"}
        with LLM(str(target), **options, speculation=speculation) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
            if speculation != "off":
                stats = llm._built.engine.speculation.stats["head"]  # type: ignore[union-attr]
                assert stats.drafted > 150 and stats.accepted > 0.9 * stats.drafted
                assert llm._built.engine.scheduler.stats.steps < 30  # of 60 without drafts
    assert found[0] == found[1] and len(set(found[0][0])) > 20


def test_what_does_not_fit_is_refused_in_a_sentence(model: str, tmp_path: Path) -> None:
    def tensor(name: str, value: torch.Tensor | None) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
        return lambda config, tensors: tensors.pop(name, None) if value is None else tensors.update({name: value})  # type: ignore[arg-type, return-value, func-returns-value]

    def setting(**changes: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
        return lambda config, tensors: config.update(changes)

    def layer(**changes: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
        return lambda config, tensors: config["transformer_layer_config"].update(changes)

    nan = torch.full((32,), torch.nan)
    wrong = [
        (tensor("fc.weight", torch.zeros(32, 99)), r"fc.weight of shape \(32, 99\), and for this model it would be"),
        (tensor("layers.0.hidden_norm.weight", None), "lacks layers.0.hidden_norm.weight"),
        (tensor("norm.weight", nan), "weights in norm.weight that are NaN or infinite"),
        (tensor("norm.weight", nan.to(torch.float8_e4m3fn)), "norm.weight in torch.float8_e4m3fn"),
        (tensor("d2t", None), "lacks d2t"),
        (tensor("d2t", torch.arange(40) * 9), "outside the vocabulary of 128"),
        (tensor("d2t", torch.zeros(40, dtype=torch.long)), "t2d and d2t that contradict each other"),
        (tensor("layers.1.mlp.down_proj.weight", nan), "layers.1.mlp.down_proj.weight, which no EAGLE-3 head"),
        (setting(eagle_aux_hidden_state_layer_ids=[2, 16, 29]), r"\[2, 16, 29\] start from, and this model has 4"),
        (setting(speculators_model_type="dflash"), "a speculator of type 'dflash'"),
        (setting(architectures=["EagleSpeculator"]), r"architectures \['EagleSpeculator'\]"),
        (setting(draft_vocab_size=500), "draft_vocab_size 500"),
        (setting(norm_output="yes"), "norm_output='yes'"),
        (layer(vocab_size=256), "a vocabulary of 256 tokens, and this model has 128"),
        (layer(num_attention_heads=3), "3 heads, which 2 key-value heads do not divide"),
        (layer(num_hidden_layers=2), "2 draft layers"),
        (layer(model_type="qwen3_next"), "draft layer of type 'qwen3_next'"),
    ]
    for change, sentence in wrong:
        with pytest.raises(ModelError, match=sentence):
            EagleHead.load(changed(tmp_path / "head", change), SPEC)
    other = spec_from_config(TINY | SHAPE | {"hidden_size": 64})
    with pytest.raises(ModelError, match="hidden width 32, and this one's is 64"):
        EagleHead.load(renamed(tmp_path / "shares", embedding=False), other)
    folder = changed(tmp_path / "head", lambda *_: None)
    (folder / FILE).write_bytes(b"\x00" * 20)
    with pytest.raises(ModelError, match="truncated, or no safetensors file"):
        LLM(model, **OPTIONS, speculation=f"head:{folder}")
    (folder / FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model.bin, which may run code when it is read\); convert"):
        LLM(model, **OPTIONS, speculation=f"head:{folder}")


def test_which_folders_are_such_heads(model: str, tmp_path: Path) -> None:
    assert all(is_eagle(DATA / name) for name in HEADS) and is_eagle(renamed(tmp_path / "renamed"))
    assert not is_eagle(model) and not is_eagle(tmp_path)


def test_layers_are_counted_as_each_format_counts_them(tmp_path: Path) -> None:
    """The library by what a layer starts from, SpecForge by what a layer ends with; and where nobody says."""
    assert EagleHead.load(renamed(tmp_path / "renamed"), SPEC).layers == (1, 2, 3)

    def unsaid(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = None

    deep = spec_from_config(TINY | {"num_hidden_layers": 32})
    assert EagleHead.load(changed(tmp_path / "head", unsaid), deep).layers == (2, 16, 29)


def test_a_head_without_embeddings_has_its_targets(model: str, tmp_path: Path) -> None:
    with LLM(model, **OPTIONS, speculation=f"head:{renamed(tmp_path / 'head', embedding=False)}") as llm:
        weights = llm._built.engine.runner.decoder.weights  # type: ignore[attr-defined]
        ids = torch.arange(9)
        assert runner_of(llm)._layer.weights.embedding(ids).equal(weights.embedding(ids))


def test_a_head_that_goes_bad_is_switched_off_and_the_answer_stands(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_drafts_free(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)

    def said(llm: LLM) -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]

    with LLM(model, **OPTIONS, speculation="off") as llm:
        plain = said(llm)
    for bad in ("not a number", "raises"):
        with LLM(model, **OPTIONS, speculation=f"head:{DATA / HEADS[0]}") as llm:
            assert said(llm) == plain and drafted(llm)
            runner = runner_of(llm)
            fc = runner._fc
            monkeypatch.setattr(runner, "_fc", None if bad == "raises" else lambda x, fc=fc: fc(x) * torch.nan)
            llm.reset_prefix_cache()
            assert said(llm) == plain
            assert [one.name for one in llm._built.engine.speculation.proposers] == ["grammar"]  # type: ignore[union-attr]
    assert "drafts of head are not used any more: the logits of the EAGLE head are not finite" in caplog.text
    assert "'NoneType' object is not callable" in caplog.text


def test_what_it_takes_is_planned_and_said(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    for speculation in ("off", f"head:{DATA / HEADS[0]}"):
        with LLM(model, **OPTIONS, speculation=speculation, kv_cache_memory=40 * 8192) as llm:
            blocks.append(llm._built.settings.num_blocks)
            (line,) = (one for one in llm._built.report if one.startswith("speculation"))
    assert blocks == [40, 32]  # of four layers, and of five
    assert "EAGLE-3 head" in line
