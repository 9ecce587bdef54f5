"""Ranks on other machines say what one rank says, whatever is killed, stopped or cut, and strangers are sent away."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from far_ranks import (
    SECRET,
    Rank,
    Wire,
    free_port,
    meanwhile,
    opened_far,
    random_budget,
    rank,
    wait_until,
)
from rank_groups import answers, gone, group_of, no_logprobs, opened
from tiny import write_tiny

from tokenmill import SamplingParams
from tokenmill.engine.ranks.agent import Agent, Offer
from tokenmill.engine.ranks.group import RanksLostError
from tokenmill.engine.ranks.machines import Machines, RanksAbsentError
from tokenmill.errors import ConfigError
from tokenmill.peers import PeerError, introduce

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

FOUR: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("four"), **FOUR)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text(SECRET)
    return path


@pytest.fixture(scope="module")
def wanted(model: str) -> list[object]:
    with opened(model, skip_tokenizer_init=True) as llm:
        return no_logprobs(answers(llm))


class Far:
    """An engine of two stages, the second of which is a machine away."""

    def __init__(self, model: str, secret: Path) -> None:
        self.port, self.secret = free_port(), secret
        self.wire = Wire(self.port)
        self.rank = Rank(self.wire.port, secret)
        self.llm = opened_far(model, "pp2", self.port, secret)

    @property
    def machines(self) -> Machines:
        found = group_of(self.llm)._machines
        assert found is not None
        return found

    @property
    def failed(self) -> int:
        return self.llm._built.engine.scheduler.stats.failed_steps

    def ask(self) -> list[object]:
        found = no_logprobs(answers(self.llm))
        self.llm._built.engine.scheduler.check_integrity()
        return found


@pytest.fixture(scope="module")
def far(model: str, secret: Path) -> Iterator[Far]:
    far = Far(model, secret)
    yield far
    pids = [*far.rank.pids, far.rank.process.pid]
    far.llm.shutdown()
    far.rank.end()
    far.wire.close()
    assert gone(pids)


def test_a_stage_on_another_machine_says_what_one_rank_says(far: Far, wanted: list[object]) -> None:
    assert far.ask() == wanted and far.failed == 0
    lines = [line for line in far.llm.plan_lines() if line.startswith("ranks")]
    assert lines[0] == "ranks        2 (pp2): rank 0 here, 1 thread each; 1 at 127.0.0.1"


def test_a_far_rank_that_is_killed_is_forked_again_there(far: Far, wanted: list[object]) -> None:
    (pid,) = far.rank.pids
    failed = far.failed
    with meanwhile(lambda: (time.sleep(0.2), os.kill(pid, signal.SIGKILL))):
        found = [far.ask() for _ in range(2)]
    assert found == [wanted, wanted] and far.ask() == wanted
    assert far.failed > failed and gone([pid]) and len(far.rank.pids) == 1


def test_a_machine_that_is_killed_is_waited_for_and_another_one_takes_its_place(far: Far, wanted: list[object]) -> None:
    pids = [*far.rank.pids, far.rank.process.pid]

    def replace() -> None:
        time.sleep(0.2)
        far.rank.kill()
        time.sleep(0.5)
        far.rank = Rank(far.wire.port, far.secret)

    with meanwhile(replace):
        found = [far.ask() for _ in range(2)]
    assert found == [wanted, wanted] and far.ask() == wanted
    assert gone(pids)


def test_a_connection_that_is_lost_costs_nobody_its_weights(far: Far, wanted: list[object]) -> None:
    pids, failed = far.rank.pids, far.failed
    with meanwhile(lambda: (time.sleep(0.2), far.wire.cut())):
        found = [far.ask() for _ in range(2)]
    assert found == [wanted, wanted] and far.ask() == wanted
    assert far.failed > failed and far.rank.pids == pids


@pytest.mark.slow
def test_connections_that_break_at_any_byte_change_no_answer(far: Far, wanted: list[object]) -> None:
    """Those of the machine and those between ranks, while they are made and while steps are on their way."""
    pids, seen = far.rank.pids, []
    for at in (60, 170, 220, 300, 3000):  # of what is between ranks: in its hello, its first words, behind them
        budgets = iter([None, at])
        far.wire.budget = lambda budgets=budgets: next(budgets, None)
        seen.append(far.wire.cuts)
        far.wire.cut()
        assert far.ask() == wanted
    far.wire.budget = random_budget(0, 6)
    seen.append(far.wire.cuts)
    far.wire.cut()
    assert far.ask() == wanted
    assert sorted(set(seen)) == seen and far.wire.cuts > seen[-1] and far.rank.pids == pids


def test_a_machine_that_hangs_is_given_up_and_comes_back(
    far: Far, wanted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, machines = far.rank.process.pid, far.machines
    (machine,) = machines._there()
    monkeypatch.setattr(machine.line, "_patience", 1.0)
    os.kill(stopped, signal.SIGSTOP)

    def go_on() -> None:
        wait_until(lambda: not machines._there(), "it was missed")
        os.kill(stopped, signal.SIGCONT)

    with meanwhile(go_on):
        assert far.ask() == wanted
    assert far.rank.process.poll() is None


@pytest.mark.slow
def test_a_far_rank_that_hangs_is_missed_and_replaced(far: Far, wanted: list[object]) -> None:
    far.ask()
    (stopped,) = far.rank.pids
    far_group = group_of(far.llm)
    far_group._generation._standstill.patience = 4.0  # of beats a second apart
    os.kill(stopped, signal.SIGSTOP)
    assert far.ask() == wanted
    assert gone([stopped])


def test_a_step_that_a_far_rank_cannot_read_ends_the_generation_at_once(
    far: Far, wanted: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tokenmill.engine.ranks import group as groups

    pids = far.rank.pids
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(groups, "encode_step", lambda step: patch.undo() or b"no step")
        assert far.ask() == wanted
    assert any("rank 1: error" in line for line in caplog.messages) and far.rank.pids == pids


def refused(far: Far, secret: bytes = SECRET.encode(), **offer: Any) -> str:
    """What a machine is told that joins and may not."""
    agent = Agent(("127.0.0.1", far.port), secret, Offer(**offer), lambda line: None)
    try:
        with pytest.raises(ConfigError) as error:
            agent.run()
    finally:
        agent.close()
    return str(error.value)


def engine_says(caplog: pytest.LogCaptureFixture, sentence: str) -> None:
    """A moment later than the other side, perhaps."""
    wait_until(lambda: caplog.messages and caplog.messages[-1].endswith(sentence), f"the engine said: {sentence}")


def test_strangers_are_sent_away_with_a_sentence_on_both_sides(
    far: Far, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("something else, of sixteen bytes")
    caplog.set_level(logging.WARNING)
    with rank(far.port, wrong) as stranger:
        assert stranger.wait() != 0
    where = f"the engine at 127.0.0.1:{far.port} cannot be joined"
    assert stranger.lines[-1] == f"error: {where}: the peer does not know the secret"
    engine_says(caplog, "somebody from 127.0.0.1 was sent away: the peer does not know the secret")

    sentence = "this machine offers 2 ranks and the engine wants 1 of other machines; offer fewer"
    assert refused(far, ranks=2) == f"the engine refuses this machine: {sentence}"
    engine_says(caplog, sentence)
    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.engine.ranks.machines.__version__", "0.0.0")
        assert refused(far).endswith("and the engine is 0.0.0; install the same on both")
    engine_says(caplog, "and the engine is 0.0.0; install the same on both")
    old = socket.create_connection(("127.0.0.1", far.port))
    with old, pytest.raises(PeerError, match="no tokenmill, or one of another version"):
        introduce(old, SECRET.encode(), b"", 99, server=False, protocol=b"tokenRK0", others="")
    engine_says(caplog, "no tokenmill, or one of another version")


@pytest.mark.slow
def test_another_model_is_refused_and_a_spare_machine_takes_the_place_of_one_that_is_lost(
    far: Far, wanted: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_tiny(tmp_path / "other", **FOUR | {"vocab_size": 333})
    caplog.set_level(logging.WARNING)
    pids = far.rank.pids
    far.rank.kill()
    wait_until(lambda: not far.machines._there(), "it was missed")
    found = refused(far, model=other)
    assert found.startswith(f"the engine computes with another model than what '{other}' is here")
    engine_says(caplog, f"was sent away: {found}")

    far.rank = Rank(far.port, far.secret)
    wait_until(far.machines._there, "it has joined")
    with rank(far.port, far.secret) as spare:
        wait_until(lambda: len(spare.lines) > 1, "it was told to wait")
        assert "has no 1 ranks in a row to give at the moment; it is asked again" in spare.lines[-1]
        assert far.ask() == wanted
        pids += far.rank.pids
        far.rank.kill()
        assert far.ask() == wanted
        assert any("this machine has rank 1 of the engine" in line for line in spare.lines)
    assert gone(pids)
    far.rank = Rank(far.wire.port, far.secret)
    assert far.ask() == wanted


def test_ranks_that_do_not_come_again_end_the_engine_with_a_sentence(far: Far) -> None:
    """The last test of this engine."""
    far.machines.patience = 1.0
    far.rank.kill()
    with pytest.raises(RanksLostError, match=r"rank 1 did not join at 127.0.0.1:\d+ within 1 s; start `tokenmill rank"):
        far.llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3), use_tqdm=False)


@pytest.mark.parametrize(
    "parallel, ranks",
    [("tp2", [1]), ("tp2,pp2", [2]), ("tp4", [1, 2])],
    ids=str,
)
@pytest.mark.slow
def test_heads_and_stages_over_machines_say_what_one_rank_says(
    model: str, secret: Path, wanted: list[object], parallel: str, ranks: list[int]
) -> None:
    """Ranks of one machine share its memory where all of a group are there; else a connection is between each two."""
    port = free_port()
    machines = [Rank(port, secret, "--ranks", str(count)) for count in ranks]
    try:
        with opened_far(model, parallel, port, secret) as llm:
            assert no_logprobs(answers(llm)) == wanted
            assert llm._built.engine.scheduler.stats.failed_steps == 0
    finally:
        assert [machine.end() for machine in machines] == [0] * len(ranks)


MIXTURE = FOUR | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def test_tokens_go_to_experts_on_another_machine(secret: Path, tmp_path: Path) -> None:
    """And requests: each machine has its own."""
    folder, port = write_tiny(tmp_path, **MIXTURE), free_port()
    with opened(folder, skip_tokenizer_init=True) as llm:
        wanted = no_logprobs(answers(llm))
    with rank(port, secret), opened_far(folder, "dp2,ep2", port, secret) as llm:
        assert no_logprobs(answers(llm)) == wanted


def test_sums_over_machines_are_the_same_bits(model: str, secret: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    bits, port = [], free_port()
    exact = {"dtype": "float32", "batch_invariant": True}
    with rank(port, secret):
        for open_one in (
            lambda: opened(model, skip_tokenizer_init=True, **exact),
            lambda: opened_far(model, "tp2", port, secret, **exact),
        ):
            with open_one() as llm:
                found = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
                heads = [line for line in llm.plan_lines() if "heads are divided between machines" in line]
                assert len(heads) == len(bits)  # said of the second one
                bits.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found])
    assert bits[0] == bits[1]


@pytest.mark.slow
def test_three_machines_in_a_row_and_the_one_in_the_middle_is_killed(
    model: str, secret: Path, wanted: list[object]
) -> None:
    """The last two call each other: the engine's machine is not between them."""
    port = free_port()
    machines = [Rank(port, secret) for _ in range(2)]
    try:
        with opened_far(model, "pp3", port, secret) as llm:
            assert no_logprobs(answers(llm)) == wanted
            middle = next(one for one in machines if any("has rank 1 of" in line for line in one.lines))

            def replace() -> None:
                time.sleep(0.2)
                middle.kill()
                machines.append(Rank(port, secret))

            with meanwhile(replace):
                found = [no_logprobs(answers(llm)) for _ in range(2)]
            assert found == [wanted, wanted] and no_logprobs(answers(llm)) == wanted
            assert any("has rank 1 of" in line for line in machines[-1].lines)
            assert llm._built.engine.scheduler.stats.failed_steps > 0
    finally:
        for machine in machines:
            machine.end()


def test_ranks_that_never_come_are_not_waited_for_forever(model: str, secret: Path) -> None:
    port = free_port()
    with pytest.raises(RanksAbsentError, match=f"rank 1 did not join at 127.0.0.1:{port} within 0.3 s; start"):
        opened_far(model, "pp2", port, secret, rank_patience=0.3)
    with pytest.raises(RanksAbsentError):  # and nobody listens there any more
        opened_far(model, "pp2", port, secret, rank_patience=0.3)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"rank_listen": "7200"}, "rank_listen is '7200'; it must be host:port"),
        ({"rank_secret_file": None}, "rank_listen needs a secret that all machines know; set rank_secret_file"),
        ({"parallel": None}, "rank_listen is set and parallel is not"),
        ({"ranks_here": 2}, "ranks_here is 2 and parallel 'pp2', which is 2 ranks: none is left"),
        ({"rank_listen": None}, "rank_secret_file is for ranks on other machines; set rank_listen"),
        (
            {"kv_host_memory": 1 << 20, "parallel": "tp2"},
            "kv_push_to reach ranks of one machine only; leave one of the two out",
        ),
        ({"rank_secret_file": "/nowhere/at/all"}, "rank_secret_file is '/nowhere/at/all', which cannot be read"),
        ({"rank_listen": "192.0.2.1:7200"}, "rank_listen is '192.0.2.1:7200', where nobody can listen"),
        ({"expert_cache": "lru"}, "expert_cache is 'lru' and parallel 'pp2', but several ranks do not cache experts"),
        ({"rank_patience": 0}, "rank_patience is 0; it must be a number of seconds above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(
    model: str, secret: Path, options: dict[str, object], sentence: str
) -> None:
    given = {"parallel": "pp2", "rank_listen": "127.0.0.1:0", "rank_secret_file": str(secret)} | options
    with pytest.raises(ConfigError, match=sentence):
        opened(model, skip_tokenizer_init=True, **given)
