"""Ranks with requests of their own and experts of each other say what one rank says, whichever of them is killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from group_of_threads import group_of as threads_of
from group_of_threads import llm_of_threads
from rank_groups import SETTINGS, answers, children, gone, group_of, no_logprobs, opened
from test_divided_models import MODELS
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner import data_rank
from tokenmill.engine.runner.data_rank import DataRank
from tokenmill.engine.step import Pending, Step
from tokenmill.errors import ConfigError
from tokenmill.serve.engine.wire import EngineStats
from tokenmill.serve.observe.metrics import _experts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

MOE = MODELS["moe"] | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
OPTIONS = SETTINGS | {"skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("moe"), **MOE)


@pytest.fixture(scope="module")
def wanted(moe: str) -> list[Any]:
    with opened(moe, skip_tokenizer_init=True) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        ("dp2,ep2", {"max_num_batched_tokens": 16}),
        ("dp2,tp2,ep4", {}),
        ("dp2", {}),
        ("dp3,tp2", {}),
        ("dp4,ep4", {"hot_experts": "1,6"}),
    ],
)
def test_groups_with_requests_of_their_own_say_what_one_rank_says(
    moe: str, wanted: list[Any], parallel: str, options: dict[str, Any]
) -> None:
    with llm_of_threads(parallel, model=moe, **OPTIONS | options) as llm:
        assert answers(llm) == wanted
        parts = llm._built.engine.scheduler.parts
        assert all(part.stats.tokens for part in parts), "a group computed nothing"
        llm._built.engine.scheduler.check_integrity()
        assert all(isinstance(one, DataRank) for one in threads_of(llm).runners)


def test_a_killed_rank_of_any_group_loses_nothing(moe: str, wanted: list[Any]) -> None:
    before, rng = set(children()), random.Random(3)
    with opened(moe, parallel="dp2,tp2,ep4", skip_tokenizer_init=True) as llm:
        assert no_logprobs(answers(llm)) == no_logprobs(wanted)
        group, killed = group_of(llm), []
        launch, left = group.launch, 5

        def launch_and_kill(step: Step) -> Pending:
            nonlocal left
            left -= 1
            pending = launch(step)
            if left <= 0:
                left = rng.randrange(4, 50)
                killed.append(rng.choice(group.pids))
                os.kill(killed[-1], signal.SIGKILL)
            return pending

        group.launch = launch_and_kill  # type: ignore[method-assign]
        assert no_logprobs(answers(llm)) == no_logprobs(wanted)
        scheduler = llm._built.engine.scheduler
        scheduler.check_integrity()
        del group.launch
        assert len(set(killed)) > 1 and gone(killed)
        assert scheduler.stats.failed_steps > 0
    assert set(children()) == before


def test_tokens_go_to_experts_and_back_by_the_formula(moe: str) -> None:
    """One request: its group reads and decodes, and the other one has nothing to do but its experts' work."""
    prompt, output = 12, 6
    with llm_of_threads("dp2,ep2", model=moe, **OPTIONS) as llm:
        ends = threads_of(llm).communicators
        sizes: list[int] = []
        exchange = ends[0].all_to_all

        def noted(x: Any) -> Any:
            sizes.append(x.shape[1])
            return exchange(x)

        ends[0].all_to_all = noted  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0)
        llm.generate([list(range(5, 5 + prompt))], params, use_tqdm=False)
        stats = llm._built.engine.scheduler.stats
        layers, top_k, item, width = 3, 3, 8, llm._built.spec.hidden
        assert stats.steps == output and all(end.counts["all_to_all"] == 4 * layers * stats.steps for end in ends)
        assert all(end.counts["all_gather"] == layers * stats.steps for end in ends)
        # Hidden states there and back, in float64; shares as the router computes, and numbers of experts.
        rows = sum(sizes) // 4
        assert rows <= layers * (prompt + output - 1), "a token is sent once to a rank"
        assert ends[0].bytes["all_to_all"] == ends[1].bytes["all_to_all"] == 2 * rows * (2 * width + 2 * top_k) * item
        idle = llm._built.engine.scheduler.parts[1].stats
        assert not idle.steps and not ends[1].counts["send"] and not ends[0].counts["receive"]


def test_the_load_of_experts_is_that_of_all_groups(moe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_rank, "COUNTED_EVERY", 1)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    with llm_of_threads("dp2,tp2,ep4", model=moe, **OPTIONS) as llm:
        llm.generate([[5] * 30, [6] * 20, [7] * 9], params, use_tqdm=False)
        before = llm._built.engine.scheduler.stats.tokens
        llm.generate([[8] * 5], SamplingParams(max_tokens=1), use_tqdm=False)  # a step that tells of those before it
        load = threads_of(llm).runner.expert_load
        groups = [threads_of(llm).runners[first].decoder.expert_load for first in (0, 2)]
        wanted = 3 * (2 * before + 3 * 4)  # three experts of every token, in the last layer of those that are read
        assert int(load.counts.sum()) == wanted
        assert all(0 < int(one.counts.sum()) < wanted for one in groups)
    told = "\n".join(str(one.samples) for one in _experts(EngineStats(experts=[3, 4], experts_dropped=1)))
    assert "'expert': '1'" in told and "value=4" in told and not list(_experts(EngineStats()))


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {}])
def test_experts_in_other_forms_take_the_tokens_of_both_groups(tmp_path: Path, options: dict[str, Any]) -> None:
    """In float32, which has kernels and packed forms of its own; one group is idle while the other goes on."""
    model, found = write_tiny(tmp_path / "moe", **MOE), []
    asked = [SamplingParams(max_tokens=length, temperature=0, prompt_logprobs=0, ignore_eos=True) for length in (1, 9)]
    settings = OPTIONS | {"dtype": "float32"} | options
    for parallel in (None, "dp2,ep2"):
        opened_by = LLM if parallel is None else llm_of_threads
        with opened_by(model=model, parallel=parallel, **settings) as llm:
            outputs = llm.generate([[5 + n % 90 for n in range(40)], [9] * 12], asked, use_tqdm=False)
            assert not llm._built.engine.scheduler.stats.failed_steps
        found.append([next(iter(one.values())).logprob for each in outputs for one in each.prompt_logprobs[1:]])
    assert found[1] == pytest.approx(found[0], abs=0.05) and len(found[0]) == 39 + 11


def test_long_answers_of_another_group_do_not_wait_for_the_next_step(tmp_path: Path) -> None:
    """Of more bytes than lie between two ranks."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=60)
    asked = [[7 + n % 90 for n in range(start, start + 400)] for start in (0, 31)]
    model, found = write_tiny(tmp_path / "moe", **MOE), []
    for parallel in (None, "dp2,ep2"):
        with opened(model, parallel=parallel, skip_tokenizer_init=True, max_model_len=512) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
            assert llm._built.engine.scheduler.stats.failed_steps == 0
        found.append([[list(one) for one in output.prompt_logprobs[1:]] for output in outputs])
    assert [len(one) for one in found[1]] == [399, 399] and found[0] == found[1]


def test_what_groups_cannot_do_is_refused_in_a_sentence(moe: str) -> None:
    with pytest.raises(ConfigError, match="the ranks of a pipeline have the same requests; leave dp out, or pp"):
        opened(moe, parallel="dp2,pp2", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="ranks with requests of their own verify no drafts; leave one of the two"):
        opened(moe, parallel="dp2,ep2", skip_tokenizer_init=True, speculation="suffix")
    with pytest.raises(ConfigError, match=r"for ranks that divide heads \(tp, ep\); leave that or these out"):
        opened(moe, parallel="dp2,ep2", skip_tokenizer_init=True, kv_host_memory=1 << 22)
    with pytest.raises(ConfigError, match="cannot divide its 8 experts among 3 ranks; ep may be 1, 2, 4, 8"):
        opened(moe, parallel="dp3,ep3", skip_tokenizer_init=True)
