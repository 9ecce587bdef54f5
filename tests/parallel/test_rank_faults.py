"""Ranks that are killed, fail or hang: every request ends with the tokens it would have had, and nothing is left."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from rank_groups import THREE, answers, children, gone, group_of, no_logprobs, opened
from strange_ranks import COMMAND, DIES, LATE, RAISES
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.ranks import group as groups
from tokenmill.engine.ranks.group import RanksLostError
from tokenmill.engine.ranks.processes import RankProcesses
from tokenmill.engine.step import Pending, Step
from tokenmill.errors import TokenmillError
from tokenmill.parallel.layout import Layout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


@pytest.fixture(scope="module")
def three_headed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("three"), **THREE)


@pytest.fixture(scope="module")
def wanted(three_headed: str) -> list[object]:
    with opened(three_headed, skip_tokenizer_init=True) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def llm(three_headed: str) -> Iterator[LLM]:
    before = set(children())
    with opened(three_headed, 3, skip_tokenizer_init=True) as llm:
        yield llm
    assert set(children()) == before


@contextlib.contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def test_ranks_are_killed_at_random_moments_and_no_answer_changes(llm: LLM, wanted: list[object]) -> None:
    rng, group = random.Random(11), group_of(llm)
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while len(killed) < 8 and not over.wait(rng.uniform(0.0, 0.5)):
            pid = rng.choice(group.pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    with meanwhile(kill):
        try:
            rounds = 0
            while rounds < 2 or (len(set(killed)) < 3 and rounds < 100):  # as many as a fast machine needs for that
                assert no_logprobs(answers(llm)) == no_logprobs(wanted)
                llm._built.engine.scheduler.check_integrity()
                rounds += 1
        finally:
            over.set()
    assert len(set(killed)) > 2 and gone(killed)


def test_an_idle_group_whose_ranks_are_killed_answers_all_the_same(llm: LLM, wanted: list[object]) -> None:
    for pid in group_of(llm).pids:
        with contextlib.suppress(ProcessLookupError):  # killed at the end of the test before, and not missed yet
            os.kill(pid, signal.SIGKILL)
    assert no_logprobs(answers(llm)) == no_logprobs(wanted)


def test_the_fork_server_is_killed_and_with_it_all_ranks(llm: LLM, wanted: list[object]) -> None:
    group = group_of(llm)
    server, pids = group._processes._server.pid, group.pids
    with meanwhile(lambda: (time.sleep(0.1), os.kill(server, signal.SIGKILL))[0]):
        assert no_logprobs(answers(llm)) == no_logprobs(wanted)
    answers(llm)
    assert gone([server, *pids]) and group._processes._server.pid != server


def test_a_rank_that_hangs_is_missed_and_replaced(llm: LLM, wanted: list[object]) -> None:
    """A stopped process computes nothing. One that computes is given more time."""
    group = group_of(llm)
    group._generation._standstill.patience = 1.0
    stopped = group.pids[1]
    os.kill(stopped, signal.SIGSTOP)
    failed = llm._built.engine.scheduler.stats.failed_steps
    assert no_logprobs(answers(llm)) == no_logprobs(wanted)
    assert llm._built.engine.scheduler.stats.failed_steps == failed + 1 and gone([stopped])


def test_a_rank_that_hangs_while_another_is_killed_is_replaced_too(llm: LLM, wanted: list[object]) -> None:
    group = group_of(llm)
    group._patience = 1.0
    stopped, killed = group.pids
    os.kill(stopped, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    assert no_logprobs(answers(llm)) == no_logprobs(wanted)
    assert gone([stopped, killed])
    group._patience = groups.PATIENCE


def test_a_step_that_fails_on_rank_0_costs_nobody_its_weights(
    llm: LLM, wanted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(llm)  # whatever the test before has left behind
    group, launched = group_of(llm), []
    pids, launch = group.pids, group.runner.launch

    def fail_once(step: Step) -> Pending:
        launched.append(step.number)
        if len(launched) == 5:
            raise MemoryError("there is none")
        return launch(step)

    monkeypatch.setattr(group.runner, "launch", fail_once)
    assert no_logprobs(answers(llm)) == no_logprobs(wanted)
    assert len(launched) == 5 and group.pids == pids


def test_a_message_that_no_rank_can_read_ends_the_generation_at_once(
    llm: LLM, wanted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(groups, "encode_step", lambda step: patch.undo() or b"no step")
        assert no_logprobs(answers(llm)) == no_logprobs(wanted)


def test_a_rank_that_comes_when_all_is_lost_again_joins_the_next_generation(
    llm: LLM, wanted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, meetings = groups.Meeting.call, []

    def lost_at_once(layout: Layout, machine: range) -> groups.Meeting:
        meetings.append(call(layout, machine))
        if len(meetings) == 1:
            meetings[0].abort()  # before anybody came: nobody can any more
        return meetings[-1]

    monkeypatch.setattr(groups.Meeting, "call", lost_at_once)
    os.kill(group_of(llm).pids[0], signal.SIGKILL)
    assert no_logprobs(answers(llm)) == no_logprobs(wanted)
    assert len(meetings) == 2


@pytest.fixture(scope="module")
def strange(tiny_model: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenmill.engine.ranks.start.RankProcesses", partial(RankProcesses, command=COMMAND))
        with opened(tiny_model, 2, skip_tokenizer_init=True) as llm:
            yield llm


def test_a_request_that_breaks_ranks_is_found_and_the_others_are_answered(
    strange: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    good = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    alone = [strange.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in good]
    pids = group_of(strange).pids
    with caplog.at_level(logging.WARNING):
        found = strange.generate([good[0], [9, RAISES], *good[1:]], params, use_tqdm=False)
    assert found[1].error is not None and "rank 1: ValueError: this rank cannot add" in found[1].error
    assert [found[at].outputs[0].token_ids for at in (0, 2, 3)] == alone
    assert group_of(strange).pids == pids, "nobody has to load again because a step failed"

    found = strange.generate([good[0], [9, DIES], *good[1:]], params, use_tqdm=False)
    assert found[1].error is not None and found[1].error.startswith("this request failed 6 times, the last ones alone")
    assert "rank 1 was killed by SIGSEGV" in found[1].error
    assert [found[at].outputs[0].token_ids for at in (0, 2, 3)] == alone
    assert group_of(strange).pids != pids
    strange._built.engine.scheduler.check_integrity()


def test_ranks_that_are_lost_again_and_again_end_the_engine_with_a_sentence(
    strange: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "FUTILE", 2)
    before = group_of(strange).pids
    with pytest.raises(RanksLostError, match=r"3 times in a row .* \(rank 1 was killed by SIGSEGV\); look for"):
        strange.generate([[9, DIES]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert gone(before)


def test_ranks_that_cannot_be_started_are_said_so(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit(3)")
    monkeypatch.setattr("tokenmill.engine.ranks.start.RankProcesses", partial(RankProcesses, command=command))
    before = set(children())
    with pytest.raises(TokenmillError, match="the ranks did not get ready in 5 tries: rank 1 is gone"):
        opened(tiny_model, 2, skip_tokenizer_init=True)
    assert set(children()) == before


def test_a_rank_is_ready_when_it_is_known_which_process_it_is(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that hangs could not be killed."""
    monkeypatch.setattr("tokenmill.engine.ranks.start.RankProcesses", partial(RankProcesses, command=LATE))
    with opened(tiny_model, 2, skip_tokenizer_init=True) as llm:
        assert len(group_of(llm).pids) == 1


def test_a_loss_is_told_to_the_generation_that_the_process_knew_of() -> None:
    """Also when it is noticed late, after the process was replaced for the next one, or before it was told anything."""
    processes = RankProcesses(2, (sys.executable, "-c", "import sys; sys.stdin.buffer.raw.read(1)"))  # forks nobody
    heard = [0, 0]

    class Heard:
        def __init__(self, generation: int) -> None:
            self.generation = generation

        def lose(self, rank: int, why: str = "") -> None:
            heard[self.generation] += rank

        def broken(self, rank: int, why: str) -> None: ...

    try:
        for generation in range(2):
            processes.ensure(1)
            peer = processes._peers[1]
            if generation == 1:
                until = time.monotonic() + 30
                while not peer.gone and time.monotonic() < until:
                    time.sleep(0.001)
            processes.order(1, {"generation": generation}, [], Heard(generation))
            until = time.monotonic() + 30
            while not heard[generation] and time.monotonic() < until:
                time.sleep(0.001)
        assert heard[0] == 1 and heard[1] == 1
    finally:
        processes.close()
