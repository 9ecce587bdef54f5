"""Ranks that divide heads keep and push whole blocks: whoever reads them may be divided in another way."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from test_prefill_decode import DECODE, decode, port_of, prompts
from test_tiers_same_tokens import conversations, open_llm, settle
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from rank_groups import children, group_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

READ = SamplingParams(temperature=0, max_tokens=1)
EXACT = {"dtype": "float64", "kv_cache_dtype": "float32"}
LISTENS = {"kv_host_memory": 8 << 20, "kv_listen": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("split"))


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef\n")
    return str(tmp_path / "secret")


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    with open_llm(model, 400, **EXACT) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts(), DECODE)]


def divided(model: str, blocks: int, parallel: str | None, **options: Any) -> LLM:
    """Each rank has so many blocks: `kv_cache_memory` is of a rank, and KV heads are two."""
    ranks = min(2, int((parallel or "tp1")[2:]))
    return open_llm(model, blocks // ranks, parallel=parallel, **EXACT | options)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ("tp2", "tp4"),
        pytest.param(None, "tp2", marks=pytest.mark.slow),
        pytest.param("tp2", None, marks=pytest.mark.slow),
        pytest.param("tp4", "tp2", marks=pytest.mark.slow),
    ],
)
def test_blocks_pushed_by_one_layout_are_read_by_another(
    model: str, expected: list[list[int]], secret: str, sender: str | None, receiver: str | None
) -> None:
    """Two KV heads: of four ranks pairs hold the same one."""
    with divided(model, 60, receiver, kv_secret_file=secret, **LISTENS) as llm:
        llm._built.engine.scheduler.kv.transfers.learn = lambda step, seconds: None
        push = {"kv_push_to": f"127.0.0.1:{port_of(llm)}", "kv_secret_file": secret}
        with divided(model, 100, sender, **push) as worker:
            worker.generate(prompts()[:4], READ)
            settle(worker._built.engine.scheduler)
        scheduler = llm._built.engine.scheduler
        before = scheduler.stats.tokens
        assert decode(llm, range(4)) == expected[:4]
        lengths = [len(one["prompt_token_ids"]) for one in prompts()[:4]]
        computed = scheduler.stats.tokens - before
        assert computed == sum((length - 1) % 16 + 1 for length in lengths) + 4 * 19, "only unfinished blocks are read"


def test_blocks_of_int8_travel_too(tmp_path: Path, secret: str) -> None:
    """Codes with scales beside them."""
    model = write_tiny(tmp_path / "tiny")
    options = {"kv_cache_dtype": "int8", "kv_secret_file": secret}
    with open_llm(model, 60, **options, **LISTENS) as llm:
        llm._built.engine.scheduler.kv.transfers.learn = lambda step, seconds: None
        with open_llm(model, 50, parallel="tp2", kv_push_to=f"127.0.0.1:{port_of(llm)}", **options) as worker:
            wanted = [list(one.outputs[0].token_ids) for one in worker.generate(prompts()[:3], DECODE)]
            settle(worker._built.engine.scheduler)
        before = llm._built.engine.scheduler.stats.tokens
        assert decode(llm, range(3)) == wanted
        lengths = [len(one["prompt_token_ids"]) for one in prompts()[:3]]
        assert llm._built.engine.scheduler.stats.tokens - before < sum(lengths) / 4 + 3 * 19


def test_memory_that_is_far_too_small_changes_no_token_whichever_rank_is_killed(model: str, tmp_path: Path) -> None:
    """Tiers outlive the loss of a rank, and blocks that are on their way belong to their transfers."""
    with open_llm(model, 400, **EXACT) as plain:
        wanted = conversations(plain)
    before, rng = set(children()), random.Random(2)
    folder = {"kv_host_memory": 200 << 10, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 64 << 20}
    with divided(model, 40, "tp2", **folder) as llm:
        engine, over, killed = llm._built.engine, threading.Event(), []
        tiers = engine.scheduler.kv.transfers.tiers

        def read() -> int:  # a fast machine takes more rounds to see enough
            return sum(tier.stats.read for tier in tiers)

        def kill() -> None:
            while len(killed) < 4 and not over.wait(rng.uniform(0.05, 0.6)):
                for pid in group_of(llm).pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            rounds = 0
            while rounds < 1 or (not (engine.scheduler.stats.failed_steps and read() > 50) and rounds < 50):
                assert conversations(llm) == wanted
                rounds += 1
        finally:
            over.set()
            thread.join()
        engine.scheduler.check_integrity()
        assert killed and engine.scheduler.stats.failed_steps
        assert read() > 50 and all(tier.stats.written for tier in tiers)
    assert set(children()) == before


def test_groups_and_stages_have_no_tiers(model: str) -> None:
    for parallel in ("pp2", "dp2"):
        with pytest.raises(ConfigError, match=r"for one rank, or for ranks that divide heads \(tp, ep\)"):
            open_llm(model, 40, parallel=parallel, kv_host_memory=1 << 20)
