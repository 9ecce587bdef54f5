"""A client whose connection broke goes on behind the last event that it has, at the same router or at another one."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from cluster import client, routed
from http_server import Server
from sim_service import run
from stream_cases import CASES, events, events_with_ids

from tokenmill.serve.router import forward

Event = tuple[str, str, Any]


def plain(found: list[Event]) -> list[tuple[str, Any]]:
    return [(name, told) for _, name, told in found]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all attempts that began with the id of an event."""
    made: list[int] = []

    def randbits(bits: int) -> int:
        if bits == 40:
            made.append(len(made))
            return made[-1]
        return random.getrandbits(bits)

    monkeypatch.setattr(forward.secrets, "randbits", randbits)
    return made


async def forget(http: httpx.AsyncClient, url: str, id: str, attempts: list[int]) -> None:
    """The replica that answered keeps nothing of it."""
    request = id.split(".")[0]
    names = [request, *(f"{request}.{1 + one}" for one in attempts)]
    answer = await http.post(f"{url}/cluster/cancel", json={"names": names})
    assert answer.status_code == 200
    assert (await http.get(f"{url}/cluster/streams/{request}")).status_code == 404


def places(found: list[Event], seed: int) -> list[int]:
    """The first events and the last, where several belong to one step, and some between them."""
    ends = {0, 1, 2, 3, len(found) - 1, len(found) - 2, len(found) - 3}
    between = {at for at, (id, _, _) in enumerate(found) if ">" in id or id.split(".")[5][1:] != "0"}
    some = set(random.Random(seed).sample(range(len(found)), min(3, len(found))))
    return sorted(at for at in ends | set(sorted(between)[:4]) | some if 0 <= at < len(found))


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed anew"])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_goes_on_behind_any_of_its_events(
    case: str, kept: bool, server: Server, attempts: list[int]
) -> None:
    path, body, read = CASES[case]

    async def main() -> None:
        async with client() as http, routed([server.url]) as (_, url), routed([server.url]) as (_, other):
            found = await events_with_ids(http, url, path, body)
            whole = read(plain(found))
            assert whole == read(await events(http, server.url, path, body))
            assert all(id for id, _, _ in found) and len({id for id, _, _ in found}) == len(found)
            for turn, at in enumerate(places(found, len(case))):
                if not kept:
                    await forget(http, server.url, found[0][0], attempts)
                rest = await events_with_ids(http, (url, other)[turn % 2], path, body, last=found[at][0])
                assert read(plain([*found[: at + 1], *rest])) == whole, at
                if at == len(found) - 1:
                    assert rest == []

    run(main())
