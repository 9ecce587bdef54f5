"""What an engine and another machine tell each other arrives whole, and whoever is silent or a stranger is left."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from far_ranks import SECRET, wait_until

from tokenmill import __version__
from tokenmill.engine.ranks import agent as agents
from tokenmill.engine.ranks import door as doors
from tokenmill.engine.ranks import line as lines
from tokenmill.engine.ranks.door import Door, call, call_for_link, heard, tell
from tokenmill.engine.ranks.line import Line
from tokenmill.engine.ranks.links import channels_of, close_links, linked, make_links
from tokenmill.engine.ranks.machines import Machines, RanksAbsentError
from tokenmill.engine.ranks.orders import Order
from tokenmill.parallel.layout import parse_layout
from tokenmill.parallel.sockets import Channels, SocketCommunicator
from tokenmill.peers import Connection, PeerError

KEY = SECRET.encode()


class Met:
    """A door, and who came in through it."""

    def __init__(self) -> None:
        self.came: list[tuple[Connection, Order, str]] = []
        self.door = Door(("127.0.0.1", 0), KEY, lambda *one: self.came.append(one))


@pytest.fixture
def met() -> Iterator[Met]:
    met = Met()
    yield met
    for connection, _, _ in met.came:
        connection.close()
    met.door.close()


def pair(met: Met, patience: float = 60.0) -> tuple[Line, Line]:
    far = call(met.door.address, KEY, {"join": {}})
    wait_until(lambda: met.came, "somebody came in")
    return Line(met.came[-1][0], patience, lambda: {"7": 1.5}), Line(far, patience)


def test_words_and_steps_of_any_size_arrive_in_order(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BEAT_EVERY", 0.01)  # between all of that
    near, far = pair(met)
    chance = random.Random(4)
    sizes = [0, 1, lines.LARGEST // 2, lines.LARGEST // 2 + 1, 3 * lines.LARGEST + 5, 17]
    steps = [(number, chance.randbytes(size)) for number, size in enumerate(sizes)]

    def send() -> None:
        for number, message in steps:
            near.send_step(number, message)
            near.tell({"behind": number})

    sender = threading.Thread(target=send)
    sender.start()
    for number, message in steps:
        assert far.next() == (number, message) and far.next() == {"behind": number}
    sender.join()
    wait_until(lambda: far.beat or far.tell({}) or near.tell({"more": 1}) or far.next(), "a beat came")
    near.end("that was all")
    while far.next() is not None:
        pass
    assert near.why == "that was all" and far.why == "the peer is gone" and far.beat == {"7": 1.5}


def test_a_side_that_says_nothing_is_left_and_one_that_beats_is_not(met: Met) -> None:
    near, far = pair(met, 1.0)
    ended = threading.Event()
    reader = threading.Thread(target=lambda: (near.next(), ended.set()))
    reader.start()
    listener = threading.Thread(target=far.next)
    listener.start()
    assert not ended.wait(2.5), "both beat"
    far._over.set()  # no more beats, and nobody hangs up: the machine stands still
    reader.join(60)
    assert ended.is_set() and near.why == "nothing was heard of it for 1 s"
    listener.join(60)


@pytest.mark.parametrize("kind, body", [(1, b"no JSON"), (1, b"[1]"), (2, b"short"), (9, b"{}")])
def test_frames_that_mean_nothing_end_the_line(met: Met, kind: int, body: bytes) -> None:
    near, far = pair(met)
    far._connection.send(kind, body)
    assert near.next() is None and near.why.startswith("the peer s")


def test_links_are_had_by_both_sides_or_by_neither(met: Met) -> None:
    link, _ = call_for_link(met.door.address, KEY, (3, 1, 0))
    with pytest.raises(PeerError):
        call_for_link(met.door.address, KEY, (3, 1, 0))  # there is one
    found = met.door.links([(3, 1, 0)], lambda: False)
    assert found is not None
    link.close()
    found[3, 1, 0][0].close()
    call_for_link(met.door.address, KEY, (4, 1, 0))[0].close()
    met.door.forget(5)
    with pytest.raises(PeerError):
        call_for_link(met.door.address, KEY, (4, 2, 0))  # of a generation that has ended
    assert met.door.links([(4, 1, 0)], lambda: True) is None


def test_strangers_and_nonsense_leave_the_door_open(met: Met) -> None:
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"tokenRK1" + bytes(32) + bytes(32)):
        with socket.create_connection(met.door.address) as stranger, contextlib.suppress(OSError):  # sent away already
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    with pytest.raises(PeerError, match="does not know the secret"):
        call(met.door.address, b"another secret of theirs", {"join": {}})
    for say in ({}, {"link": "no"}, {"link": [1]}, {"link": [1, 2, "x"]}):
        connection = call(met.door.address, KEY, say)
        if say:
            with pytest.raises(PeerError):
                heard(connection)
        connection.close()
    met.came.clear()
    connection = call(met.door.address, KEY, {"join": {"name": "a"}})
    wait_until(lambda: met.came, "one who knows the secret came in")
    tell(met.came[0][0], {"welcome": 1})
    assert heard(connection) == {"welcome": 1} and met.came[0][1:] == ({"join": {"name": "a"}}, "127.0.0.1")
    connection.close()


@pytest.mark.parametrize(
    "parallel, machines, wanted",
    [
        ("pp2", [1, 1], [(0, 1)]),
        ("tp2", [2], []),
        ("tp2,pp2", [2, 2], [(0, 2), (1, 3)]),
        ("tp2,pp2", [1, 2, 1], [(0, 1), (0, 2), (1, 3), (2, 3)]),
        ("pp3", [2, 1], [(0, 1), (0, 2), (1, 2)]),
        ("tp4", [1, 3], [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        ("dp2", [1, 1], [(0, 1)]),
    ],
)
def test_ranks_that_talk_are_connected_where_no_memory_is_between_them(
    parallel: str, machines: list[int], wanted: list[tuple[int, int]]
) -> None:
    layout, spans, at = parse_layout(parallel), [], 0
    for count in machines:
        spans.append(range(at, at + count))
        at += count
    pairs = linked(layout, spans)
    assert pairs == wanted
    doors = [Door(("127.0.0.1", 0), KEY, None) for _ in spans]
    addresses = {rank: door.address for span, door in zip(spans, doors, strict=True) for rank in span}
    found: dict[int, dict[int, tuple[socket.socket, bytes]]] = {}

    def make(span: range, door: Door) -> None:
        links = make_links(1, pairs, span, door, addresses, KEY, lambda: False)
        assert links is not None
        found.update(links)

    threads = [threading.Thread(target=make, args=one) for one in zip(spans, doors, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted((rank, other) for rank, ends in found.items() for other in ends if rank < other) == wanted
    channels = {
        rank: Channels(channels_of(rank, ends), lambda: False, lambda: None) for rank, ends in found.items() if ends
    }
    for low, high in wanted:  # both ends of one, with the same key
        import torch

        one, other = (SocketCommunicator(channels[rank], rank, (low, high), 0) for rank in (low, high))
        one.send(torch.tensor([low, high]), 1)
        assert other.receive(torch.tensor([0, 0]), 0).tolist() == [low, high]
    close_links(found)
    for door in doors:
        door.close()


def test_links_that_cannot_be_made_are_said_so_and_others_closed() -> None:
    layout = parse_layout("pp2")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:\d+: nobody is there"):
        pairs = linked(layout, [range(1), range(1, 2)])
        make_links(1, pairs, range(1, 2), None, {0: address}, KEY, lambda: False)
    assert time.monotonic() - began < 240


@pytest.fixture
def machines() -> Iterator[Machines]:
    found = Machines(parse_layout("pp2"), 1, ("127.0.0.1", 0), KEY, "rank_listen", 240.0)
    found.open("model", "fingerprint")
    yield found
    found.close()


def join(machines: Machines, name: str) -> tuple[Connection, Order]:
    said = {"version": __version__, "name": name, "ranks": 1, "had": None, "port": 1, "memory": [2, 1]}
    connection = call(machines.address, KEY, {"join": said})
    return connection, heard(connection)


def test_one_who_comes_again_before_it_was_there_gets_the_ranks_that_were_kept_for_it(machines: Machines) -> None:
    first, said = join(machines, "a")
    assert said["welcome"]["first"] == 1
    other, said = join(machines, "b")
    assert said["wait"]
    again, said = join(machines, "a")
    assert said["welcome"]["first"] == 1
    with pytest.raises(PeerError, match="the peer is gone"):
        heard(first)
    tell(again, {"here": True})
    wait_until(machines._there, "it has joined")
    wait_until(lambda: not machines._guests, "nothing is kept any more")
    for one in (first, other, again):
        one.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
def test_a_kernel_asks_whether_a_silent_peer_is_there(met: Met) -> None:
    far = call(met.door.address, KEY, {"join": {}})
    far.be_patient()
    asked = [far.release()[0].getsockopt(socket.IPPROTO_TCP, one) for one in (socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT)]
    assert far.release()[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and asked == [10, 3]
    assert far.release()[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    far.close()


class NoThread:
    def __init__(self, **options: object) -> None: ...

    def start(self) -> None: ...


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ranks 1 and 2 of three, none of whose threads runs; `said` is what its engine was told."""
    monkeypatch.setattr(agents.threading, "Thread", NoThread)
    said: list[Order] = []
    line: Any = SimpleNamespace(tell=said.append)
    order = {"generation": 7, "config": {"parallel": "pp3"}}
    nothing: Any = None
    made = agents._Generation(line, nothing, order, range(1, 3), nothing, {}, ("127.0.0.1", 1), KEY)
    monkeypatch.undo()
    yield SimpleNamespace(made=made, said=said)
    made.end()
    made._segment.forget()
    made._board.memory.close()


def test_a_failed_step_is_told_by_whoever_sees_first_that_the_generation_has_ended(generation: Any) -> None:
    board = generation.made._board
    board.fail(2, 5, "no memory")
    board.end()
    generation.made._tell_done(1)
    generation.made._tell_done(2)
    assert generation.said == [{"fail": "no memory", "step": 5, "generation": 7, "rank": 2}]


def test_ranks_that_cannot_be_started_are_told_whatever_the_reason(generation: Any) -> None:
    def forget(before: int) -> None:
        raise KeyError(before)

    door: Any = SimpleNamespace(forget=forget)
    generation.made._start({}, door, {}, [range(1), range(1, 3)], KEY)
    [said] = generation.said
    assert said == {"broken": 7, "why": "rank 1 was not started: KeyError: 7", "rank": 1}


def test_strangers_who_say_nothing_keep_nobody_out_and_guests_are_no_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors, "MOST_CALLERS", 2)
    came: list[Connection] = []
    go_on = threading.Event()

    def enter(connection: Connection, said: Order, host: str) -> None:
        came.append(connection)
        go_on.wait(240)  # as one who waits for the engine's model
        tell(connection, {"welcome": 1})

    door = Door(("127.0.0.1", 0), KEY, enter)
    guests = [call(door.address, KEY, {"join": {}}) for _ in range(3)]
    wait_until(lambda: len(came) == 3, "all came in")
    strangers = [socket.create_connection(door.address) for _ in range(2)]
    guests.append(call(door.address, KEY, {"join": {}}))
    wait_until(lambda: len(came) == 4, "one who knows the secret came in")
    with strangers[0], strangers[1], contextlib.suppress(OSError):
        while strangers[0].recv(4096):
            pass  # the oldest was sent away
    go_on.set()
    assert [heard(one) for one in guests] == [{"welcome": 1}] * 4
    for one in (*guests, *came):
        one.close()
    door.close()


def test_nobody_waits_for_ranks_of_an_engine_that_was_shut_down(machines: Machines) -> None:
    timer = threading.Timer(0.1, machines.close)
    timer.start()
    with pytest.raises(RanksAbsentError, match="the engine was shut down"):
        machines.wait(lambda done, total, what: None)
    timer.join()


def test_a_machine_asks_again_whatever_went_wrong_and_listens_where_the_engine_sees_it(
    met: Met, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    agent = agents.Agent(met.door.address, KEY, agents.Offer(), said.append)
    monkeypatch.setattr(agents, "PAUSES", (0.01, 0.01))
    errors = iter([OSError("no space"), KeyError("welcome")])

    def enter(connection: Connection) -> Line:
        if (error := next(errors, None)) is None:
            agent._closed.set()
            raise PeerError("that was all")
        raise error

    monkeypatch.setattr(agent, "_enter", enter)
    agent.run()
    where = "this machine could not join the engine at 127.0.0.1:"
    assert [one.startswith(where) for one in said] == [True, True]
    wait_until(lambda: len(met.came) == 3, "it asked again each time")
    assert "OSError: no space" in said[0] and "KeyError: 'welcome'" in said[1]
    assert agent._door is not None and agent._door.address[0] == "127.0.0.1"
    agent.close()


def test_a_machine_without_room_for_ranks_ends_the_line_and_lives(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents.Agent(met.door.address, KEY, agents.Offer(), lambda said: None)

    def begin(line: Line, said: Order) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(agent, "_begin", begin)
    near, far = pair(met)
    near.tell({"order": {}})
    agent._serve(far)
    assert far.why == "this machine cannot have its ranks now: too many open files"
    near.end()
