"""`tokenmill route`: streams come through as they are, and go on elsewhere when a replica dies, drains or hangs."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import (
    PATIENCE,
    FakeReplica,
    SimReplica,
    Told,
    client,
    completion,
    continued,
    expected,
    fakes,
    free_port,
    replicas,
    routed,
)
from http_server import Server, simulated
from sim_service import eventually, run

from tokenmill.errors import ConfigError
from tokenmill.program import ProgramState, RemoteLLM, gen, program
from tokenmill.serve.http.api_keys import add_key
from tokenmill.serve.router.app import RouterApp
from tokenmill.serve.router.settings import RouterSettings
from tokenmill.serve.settings import HttpSettings


def prompt_of(number: int, length: int = 40) -> list[int]:
    source = random.Random(number)
    return [source.randrange(3, 1000) for _ in range(length)]


def check(told: Told, number: int, max_tokens: int) -> None:
    assert told.error is None and told.done and told.finish == "length", told
    assert told.tokens == expected(prompt_of(number), max_tokens, number)
    assert len(told.ids) == 1


async def crowd(http: httpx.AsyncClient, url: str, count: int, max_tokens: int) -> list[asyncio.Task[Told]]:
    return [
        asyncio.create_task(completion(http, url, prompt_of(number), seed=number, max_tokens=max_tokens))
        for number in range(count)
    ]


def all_answer(app: RouterApp) -> bool:
    """Every replica has streams, and all of them have begun."""
    return all(one.bookings and not any(each.missing for each in one.bookings) for one in app.fleet.replicas)


def count_of(app: RouterApp, name: str) -> float:
    found = re.findall(rf"^tokenmill_router_{name}(?:{{.*}})? (\S+)$", app.metrics.text().decode(), re.M)
    return sum(map(float, found))


@pytest.fixture(scope="module")
def pair() -> Iterator[list[SimReplica]]:
    """Two replicas for the tests of this file, one after the other."""
    found = [SimReplica({"step": 0.004}, {"drain_seconds": 0.0}) for _ in range(2)]
    for one in found:
        one.start()
    yield found
    for one in found:
        one.end()


def test_answers_come_through_as_they_are_and_what_is_wrong_too(pair: list[SimReplica]) -> None:
    async def main() -> None:
        async with routed([one.url for one in pair]) as (app, url), client() as http:
            for number in range(4):
                prompt = prompt_of(number)
                check(await completion(http, url, prompt, seed=number, max_tokens=12), number, 12)
                body = {
                    "prompt": prompt,
                    "seed": number,
                    "max_tokens": 12,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                whole = (await http.post(f"{url}/v1/completions", json=body)).json()
                assert whole["choices"][0]["token_ids"] == expected(prompt, 12, number)
            assert not any(one.bookings for one in app.fleet.replicas)
            health = (await http.get(f"{url}/health")).json()
            assert health == {"status": "ok", "ready": True, "replicas": 2, "active": 1}
            assert (await http.get(f"{url}/v1/models")).json()["data"][0]["id"] == "sim"
            wrong = await http.post(f"{url}/v1/completions", json={"prompt": [5], "temprature": 1})
            assert wrong.status_code == 400 and "did you mean 'temperature'" in wrong.text
            for path, body in (("/v1/messages", {"messages": [], "model": "x"}), ("/v1/chat/completions", {})):
                assert (await http.post(url + path, json=body)).status_code in (400, 404)
            assert (await http.get(f"{url}/cluster/events")).status_code == 404
            assert (await http.get(f"{url}/nowhere")).status_code == 404
            kept = [(await http.get(f"{url}/v1/files")).json()["data"] for _ in range(3)]
            assert kept == [[], [], []]
            response = await http.post(f"{url}/reset_prefix_cache", json={})
            assert response.json() == {"status": "ok"}

    run(main())


def test_a_session_stays_with_the_replica_that_opened_it(server: Server, chat_model: str) -> None:
    @program
    def tale(s: ProgramState, number: int) -> list[str]:
        s += f"A mill {number} " + gen("first", max_tokens=5, temperature=1.0, seed=number)
        ways = s.fork(3)
        for turn, one in enumerate(ways):
            one += f"{turn}" + gen("end", max_tokens=5, temperature=1.0, seed=turn)
        return [s["first"], *ways["end"]]

    other = Server.start(chat_model)
    batch = [{"number": number} for number in range(6)]

    async def main() -> None:
        async with routed([server.url, other.url]) as (app, url), client() as http:
            found = await asyncio.to_thread(tale.run_batch, RemoteLLM(url), batch)
            alone = await asyncio.to_thread(tale.run_batch, RemoteLLM(server.url), batch)
            assert [one.result for one in found] == [one.result for one in alone]
            homes = {url for id, url in app.homes.items() if id.startswith("sess_")}
            assert homes == {server.url, other.url}  # both had some
            opened = (await http.post(f"{url}/v1/sessions", json={})).json()["id"]
            assert (await http.delete(f"{url}/v1/sessions/{opened}")).json()["deleted"]
            assert (await http.get(f"{url}/v1/sessions/{opened}")).status_code == 410

    try:
        run(main())
    finally:
        assert other.stop() == 0


def test_a_stored_response_is_found_where_it_is(server: Any) -> None:
    async def main() -> None:
        async with routed([server.url]) as (_, url), client() as http:
            first = (await http.post(f"{url}/v1/responses", json={"input": "a", "max_output_tokens": 3})).json()
            more = {"input": "b", "previous_response_id": first["id"], "max_output_tokens": 3}
            assert (await http.post(f"{url}/v1/responses", json=more)).json()["previous_response_id"] == first["id"]
            assert (await http.get(f"{url}/v1/responses/{first['id']}")).json()["id"] == first["id"]
            assert (await http.delete(f"{url}/v1/responses/{first['id']}")).json()["deleted"]

    run(main())


def test_replicas_come_and_go_while_the_router_runs(pair: list[SimReplica]) -> None:
    async def main() -> None:
        async with routed([pair[0].url]) as (app, url), client() as http:
            told = (await http.post(f"{url}/router/replicas", json={"add": pair[1].url})).json()
            assert [one["url"] for one in told["replicas"]] == [one.url for one in pair]
            await eventually(lambda: app.fleet.replicas[1].open, PATIENCE)
            asks = await crowd(http, url, 6, 60)
            await eventually(lambda: app.fleet.replicas[0].bookings)
            gone = {"drain": pair[0].url, "remove": pair[0].url, "seconds": 60}
            told = (await http.post(f"{url}/router/replicas", json=gone)).json()
            assert [one["url"] for one in told["replicas"]] == [pair[1].url]
            for number, one in enumerate(await asyncio.gather(*asks)):
                check(one, number, 60)
            assert count_of(app, "resumed_streams_total") == 0  # it was waited for
            for wrong, why in (
                ({"add": pair[1].url}, "there already"),
                ({"drain": "http://10.1.1.1:1"}, "there is no replica"),
                ({"add": "ftp://x"}, "is no address"),
                ({"ad": "x"}, "must be an object"),
            ):
                answer = await http.post(f"{url}/router/replicas", json=wrong)
                assert answer.status_code == 400 and why in answer.text
            page = await http.post(f"{url}/router/replicas", json={}, headers={"origin": "http://evil.example"})
            assert page.status_code == 403

    run(main())


def test_a_cache_aware_router_halves_what_prompts_cost(pair: list[SimReplica]) -> None:
    """Conversations of three turns at three replicas: each turn finds the one before it."""

    async def prefilled(http: httpx.AsyncClient, urls: list[str]) -> int:
        texts = [(await http.get(f"{one}/metrics")).text for one in urls]
        return sum(int(float(re.search(r"^tokenmill_prefilled_tokens_total (\S+)$", one, re.M)[1])) for one in texts)

    async def main() -> None:
        async with simulated({"step": 0.004}) as (_, third), client() as http:
            urls = [*(one.url for one in pair), third]
            cost = {}
            for policy in ("round-robin", "cache"):
                async with routed(urls, policy=policy) as (app, url):
                    before = await prefilled(http, urls)
                    histories = [prompt_of(1000 + number, 900) for number in range(5)]
                    if policy == "cache":
                        histories = [prompt_of(2000 + number, 900) for number in range(5)]
                    for turn in range(3):
                        for one in histories:  # five by three: round robin has each turn at another replica
                            told = await completion(http, url, one, seed=turn, max_tokens=20)
                            one += told.tokens + prompt_of(turn, 20)
                    await asyncio.sleep(0.1)
                    cost[policy] = await prefilled(http, urls) - before
                    if policy == "cache":
                        assert count_of(app, "expected_cached_tokens_total") >= 0.95 * count_of(
                            app, "cached_tokens_total"
                        )
                        assert count_of(app, "cached_tokens_total") > 5 * 2 * 600
            assert 2 * cost["cache"] <= cost["round-robin"], cost

    run(main())


def test_sessions_stay_together_without_a_shared_word(pair: list[SimReplica]) -> None:
    """Short prompts, of which nothing is known but whose they are; two routers agree."""

    async def homes() -> list[str]:
        found = []
        async with routed([one.url for one in pair]) as (app, url), client() as http:
            for number in range(8):
                for turn in range(2):
                    body, header = (
                        {"prompt": [number + 3, turn], "max_tokens": 1},
                        {"x-session-id": f"session {number}"},
                    )
                    answer = await http.post(f"{url}/v1/completions", json=body, headers=header)
                    assert answer.status_code == 200
                text = app.metrics.text().decode()
                found.append(re.findall(r'requests_total{replica="(.*?)",status="200"} (\S+)', text))
        return [str(one) for one in found]

    async def main() -> None:
        first = await homes()
        assert first == await homes()
        assert all(".0" in one and not re.search(r"'\d*[13579]\.0'", one) for one in first)  # in pairs
        assert len(re.findall("http", first[-1])) == 2  # some here, some there

    run(main())


def test_a_replica_that_hangs_is_left(pair: list[SimReplica]) -> None:
    async def main() -> None:
        async with routed([one.url for one in pair], hang_seconds=1.0) as (app, url), client() as http:
            asks = await crowd(http, url, 8, 300)
            await eventually(lambda: all_answer(app))
            pair[0].signal(signal.SIGSTOP)
            try:
                for number, told in enumerate(await asyncio.gather(*asks)):
                    check(told, number, 300)
                assert count_of(app, "resumed_streams_total") >= 1
            finally:
                pair[0].signal(signal.SIGCONT)
            await eventually(lambda: app.fleet.replicas[0].open, PATIENCE)

    run(main())


def test_streams_leave_a_replica_whose_engine_died_and_it_takes_work_again(pair: list[SimReplica]) -> None:
    async def main() -> None:
        async with routed([one.url for one in pair]) as (app, url), client() as http:
            asks = await crowd(http, url, 8, 300)
            await eventually(lambda: all_answer(app))
            there = len(app.fleet.replicas[0].bookings)
            pair[0].kill_engine()
            for number, told in enumerate(await asyncio.gather(*asks)):
                check(told, number, 300)
            assert count_of(app, "resumed_streams_total") == there
            await eventually(lambda: app.fleet.replicas[0].open, PATIENCE)

    run(main())


def test_a_client_that_leaves_is_cancelled_at_the_replica(pair: list[SimReplica]) -> None:
    async def main() -> None:
        async with routed([pair[0].url]) as (app, url), client() as http:
            told = Told()
            ask = asyncio.create_task(continued(http, [url], prompt_of(0), told, max_tokens=1500))

            async def active() -> int:
                return int((await http.get(f"{pair[0].url}/health")).json()["active"])

            while not await active():
                await asyncio.sleep(0.02)
            await eventually(lambda: told.last)
            attempt = told.last.split(".")[0]
            assert (await http.get(f"{pair[0].url}/cluster/streams/{attempt}")).status_code == 200
            ask.cancel()
            while await active():
                await asyncio.sleep(0.02)
            assert (await http.get(f"{pair[0].url}/cluster/streams/{attempt}")).status_code == 404  # nor is it kept
            await eventually(lambda: not app.fleet.replicas[0].bookings)
            assert count_of(app, "cancelled_total") == 1

    run(main())


def test_a_cluster_that_is_updated_and_killed_under_load_drops_no_stream(pair: list[SimReplica]) -> None:
    """One replica leaves and hands back what it has, the engine of the other dies, then all of it does: for a while
    there is none."""

    async def main() -> None:
        async with routed([one.url for one in pair]) as (app, url), client() as http:
            asks = await crowd(http, url, 24, 600)
            await eventually(lambda: all_answer(app))
            pair[0].signal(signal.SIGTERM)
            assert await asyncio.to_thread(pair[0].wait) == 0
            pair[1].kill_engine()
            pair[0].start()
            await asyncio.sleep(0.5)
            pair[1].kill()
            for number, told in enumerate(await asyncio.gather(*asks)):
                check(told, number, 600)
            assert count_of(app, "resumed_streams_total") >= 2

    run(main())


def test_a_full_replica_is_passed_over_and_the_shortest_wait_is_told() -> None:
    def busy(code: str, wait: int) -> FakeReplica:
        return FakeReplica(answer=(429, {"retry-after": str(wait)}, {"error": {"code": code, "message": "full"}}))

    async def main() -> None:
        full, fuller, mean = busy("overloaded", 7), busy("overloaded", 90), busy("rate_limit_exceeded", 3)
        async with fakes(full, fuller, mean) as urls, client() as http:
            body = {"prompt": [5]}
            async with routed(urls[:2], policy="round-robin") as (_, url):
                for turn in range(1, 3):
                    answer = await http.post(f"{url}/v1/completions", json=body)
                    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
                    assert len(full.asked) == len(fuller.asked) == turn
            async with routed([urls[2], urls[0]], policy="round-robin", seed=1) as (_, url):
                answer = await http.post(f"{url}/v1/completions", json=body)  # a tenant's limit is one everywhere
                assert answer.headers["retry-after"] == "3" and len(full.asked) == 2

    run(main())


def test_long_prompts_are_read_elsewhere_first_and_answered_whatever_comes_of_it() -> None:
    async def main() -> None:
        reads, answers = FakeReplica(), FakeReplica(answer=(200, {}, {"said": 1}))
        async with fakes(reads, answers) as urls, client() as http:
            settings = {"prefill": ((urls[0], urls[1]),), "prefill_tokens": 100}
            async with routed(urls[1:], **settings) as (app, url):
                await eventually(lambda: app.fleet.prefill_for(app.fleet.replicas[0]))
                for length, read in ((10, 0), (1000, 1)):
                    answer = await http.post(f"{url}/v1/completions", json={"prompt": [5] * length})
                    assert answer.json() == {"said": 1} and len(reads.asked) == read
                reads.answer = (503, {}, {"error": {"message": "no", "code": "unavailable"}})
                assert (await http.post(f"{url}/v1/completions", json={"prompt": [5] * 1000})).json() == {"said": 1}
                assert len(answers.asked) == 3 and not app.fleet.prefill[urls[1]][0].bookings
                told = (await http.get(f"{url}/router/replicas")).json()
                assert [(one["url"], one["for"]) for one in told["prefill"]] == [(urls[0], urls[1])]

    run(main())


@pytest.mark.slow
def test_a_split_moves_keys_and_values_and_changes_no_token(chat_model: str, tmp_path: Path) -> None:
    """Two real servers: one reads prompts and pushes their blocks, the other answers."""
    secret, port = tmp_path / "secret", free_port()
    secret.write_text("a secret of these two servers, long enough")
    decode = ("--kv-host-memory", "50000000", "--kv-listen", f"127.0.0.1:{port}", "--kv-secret-file", str(secret))
    answers = Server.start(chat_model, *decode)
    reads = Server.start(chat_model, "--kv-push-to", f"127.0.0.1:{port}", "--kv-secret-file", str(secret))

    async def main() -> None:
        settings = {"prefill": ((reads.url, answers.url),), "prefill_tokens": 64}
        async with routed([answers.url], **settings) as (app, url), client() as http:
            await eventually(lambda: app.fleet.prefill_for(app.fleet.replicas[0]), PATIENCE)
            for number in range(4):
                prompt = [1 + one % 250 for one in prompt_of(number, 600)]
                body = {"prompt": prompt, "max_tokens": 20, "seed": 1, "ignore_eos": True, "return_token_ids": True}
                split = (await http.post(f"{url}/v1/completions", json=body)).json()
                # All of them were there. Of later ones it is known whether to read is quicker than to compute.
                cached = split["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == 592 or (number and not cached)
                await http.post(f"{answers.url}/reset_prefix_cache", json={})
                alone = (await http.post(f"{answers.url}/v1/completions", json=body)).json()
                assert split["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]

    try:
        run(main())
    finally:
        assert (answers.stop(), reads.stop()) == (0, 0)


def test_missing_events_are_mended_by_a_snapshot() -> None:
    def joined(*numbers: int) -> str:
        return base64.b64encode(b"".join(b"%016d" % number for number in numbers)).decode()

    def change(sequence: int, stored: str = "", evicted: str = "") -> dict[str, Any]:
        return {"epoch": 5, "sequence": sequence, "stored": stored, "evicted": evicted}

    first = [
        {"epoch": 5, "sequence": 3, "snapshot": joined(1, 2)},
        change(4, joined(3)),
        change(6, joined(9), joined(1)),
    ]
    second = [{"epoch": 5, "sequence": 6, "snapshot": joined(2, 3, 9)}, change(7, joined(4), joined(2))]

    async def main() -> None:
        fake = FakeReplica(events=[first, second])
        async with fakes(fake) as urls, routed(urls) as (app, _):
            want = [b"%016d" % number for number in (3, 4, 9)]
            await eventually(lambda: sorted(app.fleet.router.known.identities(0)) == want)
            assert fake.followers == 2

    run(main())


@pytest.mark.parametrize(
    ("peer", "secret", "status"),
    [("10.1.2.3", None, 403), ("testclient", None, 403), ("127.0.0.1", None, 400), ("::1", None, 400),
     ("10.1.2.3", "s" * 32, 400)],
)  # fmt: skip
def test_strangers_change_no_replicas(peer: str, secret: str | None, status: int) -> None:
    """400: it got as far as what is wrong with the address."""

    async def main() -> None:
        app = RouterApp(RouterSettings((), HttpSettings(cluster_secret=secret)))
        transport = httpx.ASGITransport(app, client=(peer, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
            headers = {} if secret is None else {"x-tokenmill-cluster": secret}
            answer = await http.post("/router/replicas", json={"add": "ftp://x"}, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 403:
                assert "--cluster-secret" in answer.json()["error"]["message"]

    run(main())


class BreakingReplica(FakeReplica):
    """Breaks off every answer in its middle."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/cluster/events":
            await super().__call__(scope, receive, send)
            return
        self.asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"half": ', "more_body": True})
        await asyncio.sleep(0.05)
        raise RuntimeError("on purpose")


def test_a_whole_answer_that_breaks_off_is_not_begun_twice_nor_ended_as_if_it_were_one() -> None:
    async def main() -> None:
        breaking = [BreakingReplica(), BreakingReplica()]
        async with fakes(*breaking) as urls, routed(urls) as (_, url), client() as http:
            got = b""
            with pytest.raises(httpx.RemoteProtocolError):
                async with http.stream("GET", f"{url}/v1/models") as response:
                    async for part in response.aiter_raw():
                        got += part
            assert got == b'{"half": '
            assert sum(len(one.asked) for one in breaking) == 1

    run(main())


def test_what_a_removed_replica_kept_is_asked_of_another() -> None:
    async def main() -> None:
        gone, there = FakeReplica(), FakeReplica(answer=(404, {}, {"error": "unknown here"}))
        async with fakes(gone, there) as urls, routed(urls) as (app, url), client() as http:
            app.homes.remember("resp_1", urls[0])
            assert (await http.get(f"{url}/v1/responses/resp_1")).status_code == 200
            await http.post(f"{url}/router/replicas", json={"remove": urls[0]})
            assert (await http.get(f"{url}/v1/responses/resp_1")).status_code == 404
            assert gone.asked == there.asked == ["/v1/responses/resp_1"]

    run(main())


def test_what_all_replicas_are_to_do_is_told_to_all() -> None:
    paths = ["/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]

    async def main() -> None:
        found = FakeReplica(), FakeReplica(answer=(400, {}, {"error": "no"}))
        async with fakes(*found) as urls, routed(urls) as (_, url), client() as http:
            for path in paths:
                assert (await http.post(url + path, json={})).status_code == 400  # the worst of them
            assert found[0].asked == found[1].asked == paths

    run(main())


def test_a_replica_that_serves_something_else_gets_nothing() -> None:
    async def main() -> None:
        others = FakeReplica(status={"same": "y", "model": "other"}), FakeReplica(status={"protocol": 99})
        async with fakes(FakeReplica(), *others) as urls, routed(urls[:1]) as (app, url), client() as http:
            for one, why in zip(urls[1:], ("give all replicas the same options", "version 99 of the protocol")):
                await http.post(f"{url}/router/replicas", json={"add": one})
                await eventually(lambda: app.fleet.replicas[-1].state == "unfit")
                assert why in app.fleet.replicas[-1].why
            assert (await http.get(f"{url}/health")).json()["replicas"] == 1

    run(main())


def test_only_those_who_know_the_secret_are_of_the_cluster(tmp_path: Path) -> None:
    async def main() -> None:
        secret = "a secret of this cluster"
        key = add_key(tmp_path / "keys.json", "alice", {})
        settings = {"cluster_secret": secret, "keys": tmp_path / "keys.json"}
        async with simulated(http=settings) as (_, inner), client() as http:
            header = {"authorization": f"Bearer {key}"}
            async with routed([inner], http={"cluster_secret": secret}) as (_, url):
                http.headers.update(header)
                check(await completion(http, url, prompt_of(1), seed=1, max_tokens=5), 1, 5)
                del http.headers["authorization"]
                assert "key" in (await completion(http, url, prompt_of(1), max_tokens=5)).error["error"]["message"]
                assert (await http.get(f"{url}/router/replicas")).status_code == 403
                known = await http.get(f"{url}/router/replicas", headers={"x-tokenmill-cluster": secret})
                assert known.status_code == 200
            for wrong in ({}, {"cluster_secret": "another secret than that"}):
                async with routed([inner], ready=0, http=wrong, patience_seconds=0.1) as (app, url):
                    await eventually(lambda app=app: app.fleet.replicas[0].why)
                    assert "--cluster-secret FILE" in app.fleet.replicas[0].why
                    assert (await http.get(f"{url}/health")).status_code == 503
                    told = await completion(http, url, prompt_of(1), max_tokens=5)
                    assert told.error["error"]["code"] == "no_replica"
            route = {"x-tokenmill-route": '{"id": "a", "created": 1, "seed": 1}', **header}
            forged = await http.post(f"{inner}/v1/completions", json={"prompt": [5]}, headers=route)
            assert forged.status_code == 403

    run(main())


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"replicas": ("http://a", "http://a")}, "named twice"),
        ({"replicas": ("https://a",)}, "no address"),
        ({"replicas": ("http://a/v1",)}, "no address"),
        ({"replicas": ("http://a",), "prefill": (("http://p", "http://b"),)}, "is no --replica"),
        ({"replicas": (), "policy": "magic"}, "cache, round-robin, least-loaded"),
        ({"replicas": (), "hang_seconds": 0}, "above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_a_sentence(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RouterSettings(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_at_fifty_random_moments_under_64_streams(seed: int) -> None:
    """Replicas and engines are killed at random, and started again; 64 streams run all the time."""

    async def main() -> None:
        source, over = random.Random(seed), False
        done = 0
        gaps: list[float] = []

        async def stream(http: httpx.AsyncClient, url: str, first: int) -> None:
            nonlocal done
            number = first
            while not over:
                told = await completion(http, url, prompt_of(number), seed=number, max_tokens=200)
                check(told, number, 200)
                gaps.append(told.gap)
                done, number = done + 1, number + 64

        async with (
            replicas(4, {"step": 0.01}) as found,
            routed([one.url for one in found]) as (app, url),
            client() as http,
        ):
            streams = [asyncio.create_task(stream(http, url, first)) for first in range(64)]
            for _ in range(50):
                await asyncio.sleep(source.uniform(0.0, 0.6))
                one: SimReplica = source.choice(found)
                if source.random() < 0.5:
                    one.kill_engine()
                else:
                    one.kill()
                    one.start()
                assert not any(each.done() for each in streams), [each for each in streams if each.done()]
                await eventually(lambda: sum(each.open for each in app.fleet.replicas) >= 2, PATIENCE)
            over = True
            await asyncio.gather(*streams)
            gaps.sort()
            print(json.dumps({"streams": done, "resumed": count_of(app, "resumed_streams_total"), "gap": gaps[-1]}))
            assert done >= 64 and count_of(app, "resumed_streams_total") >= 10

    asyncio.run(asyncio.wait_for(main(), 600))
