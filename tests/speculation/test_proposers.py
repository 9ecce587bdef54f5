"""What proposers do besides leaving answers as they are: what they save, read and plan, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY, write_tiny
from tiny_drafts import drafted, made_head, make_drafts_free

from tokenmill import LLM, SamplingParams
from tokenmill.engine.request import Request
from tokenmill.engine.speculation import choose
from tokenmill.engine.speculation.head import HeadProposer
from tokenmill.errors import ConfigError, ModelError
from tokenmill.ops.native.library import Library, load

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 16, "max_model_len": 256,
}  # fmt: skip
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
# What is repeated is drafted; what is sampled at random is not
PROMPTS = [[3 + (7 * i + j) % (5 + i) for j in range(12 + 9 * i)] for i in range(6)]
GREEDY = {"temperature": 0.0}


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="module")
def head(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_head(model, tmp_path_factory.mktemp("heads") / "head.safetensors", OPTIONS)


def answers(llm: LLM, way: dict[str, Any], tokens: int = 60, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **way)
    found = []
    for _ in range(2):  # the second time with a warm prefix cache
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        assert all(one.error is None for one in outputs)
        found += [(list(one.token_ids), one.logprobs) for output in outputs for one in output.outputs]
    return found


@pytest.fixture(scope="module")
def engines(model: str) -> Iterator[dict[str, LLM]]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setitem(choose.PER_TOKEN, "cpu", 0.0)
        names = {"off": "off", "suffix": "suffix", "itself": f"draft:{model}"}
        yield {name: stack.enter_context(LLM(model, speculation=value, **OPTIONS)) for name, value in names.items()}


def test_a_head_without_recorded_steps_is_refused(model: str, head: Path) -> None:
    with pytest.raises(ConfigError, match="a head drafts in recorded steps only"):
        LLM(model, **OPTIONS, speculation=f"head:{head}", cuda_graphs=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculation", ["off", "suffix"])
def test_who_is_cancelled_leaves_as_soon_with_drafts_as_without(model: str, speculation: str, overlap: bool) -> None:
    """At once, or behind the step that is on its way; its blocks are free then, and nothing more is said."""
    with LLM(model, **(OPTIONS | {"speculation": speculation, "overlap": overlap})) as llm:
        engine = llm._built.engine
        free = engine.scheduler.kv.pool.num_free
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        one = Request("one", PROMPTS[2], params, max_tokens=150, seed=1)
        engine.add(one)
        while one.num_output < 60:
            engine.step()
        assert speculation == "off" or drafted(llm) > 20
        engine.cancel(one.id)
        said = engine.step()
        assert not engine.has_work and not any(delta.tokens for delta in said)
        assert engine.scheduler.kv.pool.num_free == free
        engine.scheduler.check_integrity()


def test_a_long_repetition_takes_far_fewer_steps(engines: dict[str, LLM]) -> None:
    taken = {}
    for name in ("off", "suffix"):
        stats = engines[name]._built.engine.scheduler.stats
        before = stats.steps
        answers(engines[name], GREEDY, tokens=150)
        taken[name] = stats.steps - before
    assert taken["off"] > 1.5 * taken["suffix"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (True, "it must be on, off, suffix"),
        (["suffix"], "it must be on, off, suffix"),
        ("suffix,suffix", "one suffix is enough"),
        ("draft:/nowhere", "its draft model cannot be found: model '/nowhere'"),
        ("ngram", "it must be on, off, suffix, head:FILE"),
        ("head:", "it must be on"),
        ("suffix:x", "it must be on"),
    ],
)
def test_what_is_no_proposer_is_refused(model: str, value: Any, told: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=told):
        LLM(model, speculation=value, **OPTIONS)


def test_a_head_of_another_model_is_refused(head: Path, tmp_path: Path) -> None:
    wider = write_tiny(tmp_path / "wider", hidden_size=TINY["hidden_size"] * 4)
    with pytest.raises(ModelError, match="drafts for a model of hidden width 64, and this one's is 128"):
        LLM(wider, speculation=f"head:{head}", **OPTIONS)


def test_a_head_that_goes_bad_is_switched_off_and_the_answer_stands(
    model: str, head: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model, speculation=f"suffix,head:{head}", **OPTIONS) as llm:
        plain = answers(llm, GREEDY)
        speculation = llm._built.engine.speculation
        assert speculation is not None
        proposer = next(one for one in speculation.proposers if one.name == "head")
        assert isinstance(proposer, HeadProposer)
        assert proposer._recorded is not None
        enter = proposer._recorded.enter
        monkeypatch.setattr(proposer._recorded, "enter", lambda hidden, *rest: enter(hidden * torch.nan, *rest))
        assert answers(llm, GREEDY) == plain
        assert proposer not in speculation.proposers and speculation.proposers
    assert "drafts of head are not used any more" in caplog.text and "not finite" in caplog.text


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_model_itself_is_always_right(
    engines: dict[str, LLM], temperature: float, cached: bool
) -> None:
    """Its keys and values are where they should be, and it is sampled with the same noise; also where the prompts are
    in the cache and it has not read them.
    """
    llm = engines["itself"]
    llm.reset_prefix_cache()
    if cached:
        answers(llm, {"temperature": 0.0, "beam_width": 3}, tokens=20)  # beams have no drafts
    assert llm._built.engine.speculation is not None
    stats = llm._built.engine.speculation.stats["draft"]
    before = stats.drafted, stats.accepted
    answers(llm, {"temperature": temperature, "seed": 11})
    assert stats.accepted - before[1] == stats.drafted - before[0] > 200


def test_a_draft_model_reads_no_prefix_that_it_has_read_before(engines: dict[str, LLM]) -> None:
    llm = engines["itself"]
    llm.reset_prefix_cache()
    assert llm._built.engine.speculation is not None
    (proposer,) = (one for one in llm._built.engine.speculation.proposers if one.name == "draft")
    launch, read = proposer._runner.launch, []  # type: ignore[attr-defined]

    def counted(step: Any) -> Any:
        read.append(step.num_tokens - len(step.rows))
        return launch(step)

    proposer._runner.launch = counted  # type: ignore[attr-defined]
    try:
        prompt = [9 + i % 23 for i in range(150)]
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        for expected in (range(140, 160), range(0, 32)):
            read.clear()
            llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            assert sum(read) in expected
    finally:
        proposer._runner.launch = launch  # type: ignore[attr-defined]


def test_draft_models_that_do_not_fit_are_refused_in_a_sentence(model: str, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", vocab_size=TINY["vocab_size"] + 8)
    with pytest.raises(ConfigError, match=f"knows {TINY['vocab_size'] + 8} tokens, not {TINY['vocab_size']}"):
        LLM(model, **OPTIONS, speculation=f"draft:{other}")
    with pytest.raises(ConfigError, match="one draft model is enough"):
        LLM(model, **OPTIONS, speculation=f"draft:{model},draft:{model}")
    with pytest.raises(ConfigError, match="must be on, off, suffix, head:FILE, draft:MODEL"):
        LLM(model, **OPTIONS, speculation="draft:")
    for layers in ("0", str(TINY["num_hidden_layers"]), "some"):
        with pytest.raises(ConfigError, match=f"layers:{layers}, but this model has"):
            LLM(model, **OPTIONS, speculation=f"layers:{layers}")


@pytest.mark.parametrize("memory", [{}, {"kv_cache_memory": 64 * 8192}])
def test_drafts_take_no_block_of_the_memory_plan(model: str, head: Path, memory: dict[str, int]) -> None:
    """But for models that draft, whose keys and values lie in the same blocks."""
    blocks = []
    for speculation in ("off", "suffix", f"suffix,head:{head}", "layers:1"):
        with LLM(model, **(OPTIONS | memory | {"speculation": speculation})) as llm:
            blocks.append(llm._built.settings.num_blocks)
    assert len({*blocks}) == 1


def test_the_memory_plan_has_both_models(model: str) -> None:
    blocks = []
    for speculation in ("off", f"draft:{model}"):
        with LLM(model, **(OPTIONS | {"speculation": speculation, "kv_cache_memory": 64 * 8192})) as llm:
            blocks.append(llm._built.settings.num_blocks)
    assert blocks == [64, 32]
