"""Stages that are processes say what one rank says, whichever of them is killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_groups import answers, children, gone, group_of, no_logprobs, opened
from tiny import write_tiny

from tokenmill import SamplingParams
from tokenmill.engine.step import Pending, Step
from tokenmill.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

FOUR: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("four"), **FOUR)


@pytest.fixture(scope="module")
def wanted(four_layers: str) -> list[object]:
    with opened(four_layers, skip_tokenizer_init=True) as llm:
        return answers(llm)


def test_three_stages_say_what_one_rank_says_whichever_is_killed(four_layers: str, wanted: list[object]) -> None:
    before, rng = set(children()), random.Random(3)
    with opened(four_layers, parallel="pp3", skip_tokenizer_init=True) as llm:
        assert no_logprobs(answers(llm)) == no_logprobs(wanted)
        group, killed = group_of(llm), []
        launch, left = group.launch, 5

        def launch_and_kill(step: Step) -> Pending:
            """A rank every now and then, while steps of it are in flight or it computes one."""
            nonlocal left
            left -= 1
            pending = launch(step)
            if left <= 0:
                left = rng.randrange(4, 70)
                killed.append(rng.choice(group.pids))
                os.kill(killed[-1], signal.SIGKILL)
            return pending

        group.launch = launch_and_kill  # type: ignore[method-assign]
        for _ in range(2):
            assert no_logprobs(answers(llm)) == no_logprobs(wanted)
            llm._built.engine.scheduler.check_integrity()
        del group.launch
        assert len(set(killed)) > 2
        assert llm._built.engine.scheduler.stats.failed_steps > 0 and gone(killed)
    assert set(children()) == before


def test_two_stages_of_two_ranks_say_what_one_says(four_layers: str, wanted: list[object]) -> None:
    with opened(four_layers, parallel="tp2,pp2", skip_tokenizer_init=True) as llm:
        assert no_logprobs(answers(llm)) == no_logprobs(wanted)
        assert any(line.startswith("ranks        4 (tp2,pp2)") for line in llm.plan_lines())


def test_long_answers_and_large_steps_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Both are more than lies between two ranks: each would wait for the other to take what it sends."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=60)
    asked = [[7 + n % 90 for n in range(start, start + 400)] for start in (0, 31)]
    found = []
    for parallel in (None, "pp2"):
        wide = write_tiny(tmp_path / "wide", hidden_size=256)
        with opened(wide, parallel=parallel, skip_tokenizer_init=True, max_model_len=512) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
            assert llm._built.engine.scheduler.stats.failed_steps == 0
        found.append([[list(one) for one in output.prompt_logprobs[1:]] for output in outputs])
    assert [len(one) for one in found[1]] == [399, 399] and found[0] == found[1]


def test_what_stages_cannot_do_is_refused_in_a_sentence(four_layers: str) -> None:
    with pytest.raises(ConfigError, match="has 4 layers, which cannot be divided among 5 stages; pp may be up to 4"):
        opened(four_layers, parallel="pp5", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="stages verify no drafts; leave one of the two out"):
        opened(four_layers, parallel="pp2", skip_tokenizer_init=True, speculation="suffix")
