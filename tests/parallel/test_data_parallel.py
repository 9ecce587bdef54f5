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
from rank_groups import SETTINGS, children, gone, group_of, mixed, opened, prompts, said
from test_divided_models import MODELS
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.data_rank import DataRank
from tokenmill.engine.step import Pending, Step
from tokenmill.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

STREAMS = 20
MOE = MODELS["moe"] | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
OPTIONS = SETTINGS | {"skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("moe"), **MOE)


@pytest.fixture(scope="module")
def wanted(moe: str) -> list[Any]:
    with opened(moe, skip_tokenizer_init=True) as llm:
        return answers(llm)


def answers(llm: LLM) -> list[Any]:
    llm.reset_prefix_cache()
    return said(llm.generate(prompts(5, STREAMS), mixed(5, STREAMS), use_tqdm=False))


def no_logprobs(all_said: list[Any]) -> list[object]:
    return [[(tokens, why) for tokens, why, _ in one] for one, _ in all_said]


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        ("dp2,ep2", {}),
        ("dp2,tp2,ep4", {}),
        ("dp2", {}),
        ("dp3,tp2", {"hot_experts": None}),
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
