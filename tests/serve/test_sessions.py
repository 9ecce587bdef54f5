"""Programs on a server say what they say in a process of their own, and leave nothing behind however they end."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server

from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.program import ProgramState, RemoteLLM, assistant, gen, program, select, system, user

STORY = "Once upon a time there was a mill by a river, and the mill turned day and night. " * 3


@pytest.fixture(scope="module")
def llm(chat_model: str) -> Iterator[LLM]:
    with LLM(chat_model, load_format="dummy", dtype="float64", device="cpu", max_num_seqs=16) as llm:
        yield llm


@pytest.fixture
def remote(server: Server) -> Iterator[RemoteLLM]:
    """Afterwards nothing is left of any program."""
    yield RemoteLLM(server.url)
    assert_nothing_left(server)


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"tokenmill_{name} "))


def eventually(check: Any, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_nothing_left(server: Server, restarts: int = 0) -> None:
    """Every block is free again, cached or not. An engine that falls idle checks its blocks itself, and fails if one
    cannot be explained."""

    def free() -> bool:
        told = httpx.get(f"{server.url}/metrics").text
        figures = {line.split(" ")[0]: float(line.split(" ")[1]) for line in told.splitlines() if line[0] != "#"}
        blocks = [figures[f"tokenmill_kv_blocks{kind}"] for kind in ("", "_free", "_cached")]
        return figures["tokenmill_sessions_open"] == 0 and 0 < blocks[0] == blocks[1] + blocks[2]

    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})  # figures are told by steps
    eventually(free)
    assert httpx.get(f"{server.url}/health/ready").json()["restarts"] == restarts


@program
def tale(s: ProgramState, number: int) -> list[str]:
    s += STORY + f"{number}: " + gen("first", max_tokens=9, temperature=1.0, seed=number, ignore_eos=True)
    s += " so " + gen("form", max_tokens=20, temperature=0, regex="[a-c]{3,6}[0-9]")
    ways = s.fork(3)
    for turn, one in enumerate(ways):
        one += f" {turn} " + gen("end", max_tokens=7, temperature=1.0, seed=turn, ignore_eos=True)
    s += " and " + select("choice", ["yes", "no", "perhaps so"])
    s += gen("last", max_tokens=5, temperature=0, ignore_eos=True, logprobs=2)
    s += "."
    return [s["first"], s["form"], *ways["end"], s["choice"], s["last"], *(one.text() for one in ways)]


@program
def conversation(s: ProgramState) -> None:
    s += system("Be brief.") + user("Hello")
    s += assistant(gen("greeting", max_tokens=8, temperature=0))
    s += user("And now?")
    s += assistant("Well: " + gen("now", max_tokens=8, temperature=0, stop="e"))
    s += user("Bye")


def test_programs_say_the_same_on_a_server(llm: LLM, remote: RemoteLLM) -> None:
    batch = [{"number": number} for number in range(6)]
    local, there = (tale.run_batch(where, batch) for where in (llm, remote))
    for one, other in zip(local, there, strict=True):
        assert other.result == one.result
        assert other.token_ids == one.token_ids and other.text() == one.text()
        assert other.meta("choice")["scores"] == pytest.approx(one.meta("choice")["scores"], abs=1e-9)
        mine, theirs = (state.meta("last")["output"].outputs[0] for state in (one, other))
        assert theirs.token_ids == mine.token_ids and theirs.finish_reason == mine.finish_reason
        for table, expected in zip(theirs.logprobs, mine.logprobs, strict=True):
            assert {id: found.logprob for id, found in table.items()} == pytest.approx(
                {id: found.logprob for id, found in expected.items()}
            )
    assert there[0].usage.calls == local[0].usage.calls
    assert there[0].usage.prompt_tokens == local[0].usage.prompt_tokens
    one, other = conversation.run(llm), conversation.run(remote)
    assert (other["greeting"], other["now"], other.text()) == (one["greeting"], one["now"], one.text())
    assert asyncio.run(tale.arun(remote, 2)).result == local[2].result


@pytest.mark.parametrize("served", [False, True])
def test_eight_branches_read_a_long_prefix_once_and_say_what_separate_calls_say(
    llm: LLM, remote: RemoteLLM, served: bool
) -> None:
    prefix = (STORY * 8)[:1500]
    tokens = len(llm.get_tokenizer().encode(prefix))  # type: ignore[union-attr]
    assert tokens >= 1500
    for heat in (0.0, 1.0):

        @program(cache_salt=f"heat {heat}")
        def branches(s: ProgramState, heat: float = heat) -> list[str]:
            s += prefix
            ways = s.fork(8)
            for number, one in enumerate(ways):
                one += f"{number}" + gen("end", max_tokens=6, temperature=heat, seed=number, ignore_eos=True)
            return ways["end"]

        state = branches.run(remote if served else llm)
        params = [SamplingParams(max_tokens=6, temperature=heat, seed=k, ignore_eos=True) for k in range(8)]
        found = llm.generate([f"{prefix}{k}" for k in range(8)], params, use_tqdm=False)
        assert state.result == [one.outputs[0].text for one in found]
        assert state.usage.computed_tokens == tokens + 8  # the prefix once, and each branch's own digit
        assert state.usage.calls == 9


@pytest.mark.parametrize(
    ("example", "name", "asked"),
    [
        ("tree_of_thought", "think", {"question": "How many legs do two birds have?"}),
        ("self_consistency", "vote", {"question": "What colour is the sky?"}),
        ("json_extraction", "extract", {"document": "Dear Sir, the lamps came broken. Yours, B. Jones"}),
        ("agent_loop", "agent", {"question": "Do more people live in Rome?"}),
        ("judge", "judge", {"question": "What is bread?", "answers": ["Flour and water.", "Bread bread."]}),
    ],
)
def test_examples_say_the_same_on_a_server(
    llm: LLM, remote: RemoteLLM, example: str, name: str, asked: dict[str, Any]
) -> None:
    path = Path(__file__).parents[2] / "examples" / f"{example}.py"
    spec = importlib.util.spec_from_file_location(example, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    here, there = (getattr(module, name).run(where, **asked) for where in (llm, remote))
    assert there.result == here.result and there.text() == here.text() and there.token_ids == here.token_ids
    assert there.usage.prompt_tokens == here.usage.prompt_tokens and there.usage.saved_tokens > 0


def test_a_connection_can_be_used_after_an_answer_that_failed(remote: RemoteLLM) -> None:
    asked = remote.connection
    path = f"/v1/sessions/{asked.ask('POST', '/v1/sessions', {})['id']}"
    with pytest.raises(InvalidRequest, match="append it first"):
        list(asked.stream(path, {"do": [{"select": {"choices": ["a"]}}], "stream": True}))
    assert asked.ask("DELETE", path)["deleted"]


def test_a_client_of_a_server_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from tokenmill.program import RemoteLLM, gen, program, select"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_texts_travel_with_the_next_call(server: Server, remote: RemoteLLM) -> None:
    def calls() -> int:
        text = httpx.get(f"{server.url}/metrics").text
        route = 'tokenmill_http_requests_total{route="/v1/sessions/{name}",status="200"} '
        return next((int(float(line[len(route) :])) for line in text.splitlines() if line.startswith(route)), 0)

    @program
    def chatty(s: ProgramState) -> None:
        s += STORY
        s += "one" + gen("a", max_tokens=2)
        s["a"]
        s += " two "
        s += "three"
        s.sync()
        s += gen("b", max_tokens=2)
        s["b"]
        s += " the end"

    before = calls()
    state = chatty.run(remote)
    assert state.text() == f"{STORY}one{state['a']} two three{state['b']} the end"
    eventually(lambda: calls() == before + 3)  # two calls, and the end of the session


def test_a_result_is_streamed_from_a_server(remote: RemoteLLM) -> None:
    pieces: list[str] = []

    @program
    def told(s: ProgramState) -> None:
        s += STORY + gen("end", max_tokens=40, temperature=0, ignore_eos=True)
        pieces.extend(s.stream("end"))

    state = told.run(remote)
    assert len(pieces) > 1 and "".join(pieces) == state["end"]


def test_errors_of_programs_and_refusals_reach_who_asked(remote: RemoteLLM) -> None:
    @program
    def fragile(s: ProgramState, number: int) -> None:
        s += STORY + gen("text", max_tokens=400, temperature=0, ignore_eos=True)
        if number == 1:
            raise ZeroDivisionError("of the user's own")  # while the call is under way
        if number == 2:
            s += STORY * 40
            branches = s.fork(2)
            branches[0] += gen("never", max_tokens=3)
            branches[0]["never"]
        if number == 3:
            s += user("Hello")

    states = fragile.run_batch(remote, [{"number": number} for number in range(4)], return_exceptions=True)
    assert [type(one.exception) for one in states] == [type(None), ZeroDivisionError, InvalidRequest, InvalidRequest]
    assert "begin a chat with a turn" in str(states[3].exception)
    with pytest.raises(TokenmillError, match="has ended"):
        state = states[0]
        state += " more" + gen("more", max_tokens=3)
        state["more"]
    with pytest.raises(TokenmillError, match="cannot be asked"):
        fragile.run(RemoteLLM("http://127.0.0.1:9"), number=0)
    with pytest.raises(InvalidRequest, match="no option 'colour'"):
        fragile.with_options(colour="red").run(remote, number=0)


def test_an_interrupted_program_leaves_nothing(server: Server, remote: RemoteLLM) -> None:
    started, ended = threading.Event(), threading.Event()

    @program
    def endless(s: ProgramState) -> None:
        try:
            while True:
                s += "a" + gen("b", max_tokens=2, temperature=0, ignore_eos=True)
                s["b"]
                started.set()
        finally:
            ended.set()

    async def run() -> None:
        forever = asyncio.create_task(endless.arun(remote))
        await asyncio.to_thread(started.wait)
        forever.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forever
        await asyncio.to_thread(ended.wait)

    asyncio.run(run())


# -- the API as other languages see it ------------------------------------------------------------------------------


def opened(server: Server, **options: Any) -> str:
    answer = httpx.post(f"{server.url}/v1/sessions", json=options)
    assert answer.status_code == 200, answer.text
    return f"{server.url}/v1/sessions/{answer.json()['id']}"


def test_a_session_in_json(server: Server, llm: LLM) -> None:
    session = opened(server, lease_seconds=30)
    asked = {"do": [STORY, {"gen": {"name": "a", "max_tokens": 5, "temperature": 0}}, {"fork": ["x", "y"]}]}
    told = httpx.post(session, json=asked).json()
    [said] = told["results"]
    wanted = llm.generate(STORY, SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)[0].outputs[0]
    assert (said["name"], said["text"], said["token_ids"]) == ("a", wanted.text, wanted.token_ids)
    assert told["text"] == STORY + wanted.text and told["usage"]["calls"] == 1
    choice = {"select": {"choices": ["yes", "no"]}}
    streamed = httpx.post(session, json={"state": "x", "do": [" so ", choice], "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    plain = httpx.post(session, json={"state": "y", "do": [" so ", choice]}).json()
    assert [list(one) for one in events[:2]] == [["name", "delta"], ["result"]]
    assert events[1]["result"]["scores"] == pytest.approx(plain["results"][0]["scores"])
    assert streamed.endswith("data: [DONE]\n\n") and events[-1]["text"] == plain["text"]
    renewed = httpx.post(session, json={"lease_seconds": 50, "do": [{"drop": ["x"]}]})
    assert renewed.status_code == 200
    seen = httpx.get(session).json()
    assert seen["lease_seconds"] == 50 and set(seen["states"]) == {"main", "y"} and 0 < seen["expires_in"] <= 50
    assert httpx.delete(session).json()["deleted"]
    gone = httpx.post(session, json=asked)
    assert gone.status_code == 410 and "it was closed" in gone.json()["error"]["message"]
    missing = httpx.get(f"{server.url}/v1/sessions/sess_nobody")
    assert missing.status_code == 404 and "there is no session" in missing.json()["error"]["message"]
    assert_nothing_left(server)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"do": [5]}, "a step is text"),
        ({"do": [{"gen": {}, "select": {}}]}, "a step is text"),
        ({"do": [{"gen": {"temprature": 1}}]}, "temperature"),
        ({"do": [{"gen": {"self": 1}}]}, "gen has 'self'"),
        ({"do": [{"gen": {"n": 2}}]}, "fork the state"),
        ({"do": [{"gen": {"logprobs": 500}}]}, "from 0 to 20"),
        ({"do": [{"select": {"choices": "ab"}}]}, "list of texts"),
        ({"do": [{"role": "user", "content": [{"role": "user", "content": "x"}]}]}, "inside a turn"),
        ({"do": [{"fork": ["main"]}]}, "there is a state of this name"),
        ({"do": [{"fork": ["a", "a"]}]}, "twice"),
        ({"do": [{"drop": ["main"]}]}, "no other state"),
        ({"do": ["x" * 100_000]}, "characters"),
        ({"do": "x"}, "array"),
        ({"do": [{"gen": {"max_tokens": 1}}]}, "behind no text"),
        ({"do": [{"select": {"choices": ["a", "b"]}}]}, "behind no text"),
        ({"do": ["a", {"gen": {"max_tokens": 1}}, {"gen": {"regex": "(a"}}]}, "regex"),
        ({"do": ["a", {"gen": {"regex": "(?=a)b\\1"}}]}, "regex"),
        ({"do": ["a", {"gen": {"grammar": "root ::= nobody"}}]}, "structured output"),
        ({"do": ["a", {"gen": {"stop_token_ids": [10**6]}}]}, "stop_token_ids"),
        ({"state": "nobody"}, "no state 'nobody'"),
        ({"lease_seconds": 0.1}, "lease_seconds is 0.1"),
    ],
)
def test_what_a_session_cannot_do_is_refused_and_changes_nothing(server: Server, wrong: Any, said: str) -> None:
    session = opened(server)
    answer = httpx.post(session, json=wrong)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"], answer.text
    told = httpx.get(session).json()["states"]["main"]
    assert told == {"tokens": 0, "busy": False}
    after = httpx.post(session, json={"do": ["a", {"gen": {"max_tokens": 1}}]})
    assert after.status_code == 200 and after.json()["text"].startswith("a")
    httpx.delete(session)


def test_who_leaves_a_call_ends_its_state_and_no_other(server: Server) -> None:
    session = opened(server)
    httpx.post(session, json={"do": [STORY, {"fork": ["other"]}]})
    long = {"do": [{"gen": {"max_tokens": 1500, "ignore_eos": True}}]}
    with httpx.stream("POST", session, json=long | {"stream": True}) as answer:
        next(answer.iter_lines())
        assert httpx.post(session, json={"do": []}).status_code == 409
    with pytest.raises(httpx.TimeoutException):
        httpx.post(session, json=long | {"state": "other"}, timeout=0.3)
    eventually(lambda: not any(one["busy"] for one in httpx.get(session).json()["states"].values()))
    ended = httpx.post(session, json={"do": ["x"]})
    assert ended.status_code == 409 and "the client left" in ended.json()["error"]["message"]
    httpx.delete(session)
    assert_nothing_left(server)


def test_an_abandoned_session_ends_with_its_lease(server: Server) -> None:
    session = opened(server, lease_seconds=1)
    asked = {"do": [STORY, {"gen": {"max_tokens": 5}}, {"fork": ["a", "b"]}]}
    assert httpx.post(session, json=asked).status_code == 200
    eventually(lambda: metric(server, "sessions_open") == 0)
    gone = httpx.post(session, json=asked)
    assert gone.status_code == 410 and "1 s, which was its lease" in gone.json()["error"]["message"]
    assert 'tokenmill_sessions_ended_total{how="lease"}' in httpx.get(f"{server.url}/metrics").text
    assert_nothing_left(server)


def test_a_session_survives_the_death_of_the_engine(llm: LLM, chat_model: str) -> None:
    """Between two calls, and in the middle of one: the front has the tokens."""
    server = Server.start(chat_model, "--max-model-len", "2048")
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}

    @program
    def long(s: ProgramState, kill: Any) -> list[str]:
        s += STORY + gen("a", max_tokens=30, **sampling)
        s["a"]
        kill()
        s += " then " + gen("b", max_tokens=300, **sampling)
        next(s.stream("b"))
        kill()
        ways = s.fork(2)
        for one in ways:
            one += gen("c", max_tokens=10, **sampling)
        return [s["a"], s["b"], *ways["c"]]

    def kill() -> None:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

    try:
        assert long.run(RemoteLLM(server.url), kill).result == long.run(llm, lambda: None).result
        assert_nothing_left(server, restarts=2)
    finally:
        assert server.stop() == 0


@contextmanager
def guarded(chat_model: str, folder: Path, **limits: Any) -> Iterator[tuple[Server, dict[str, str]]]:
    from tokenmill.serve.http.api_keys import add_key

    keys = {name: add_key(folder / "keys.json", name, limits) for name in ("ann", "bob")}
    server = Server.start(
        chat_model, "--keys", str(folder / "keys.json"), "--max-sessions", "2", "--max-session-tokens", "2000"
    )
    try:
        yield server, keys
    finally:
        assert server.stop() == 0


def test_tenants_have_sessions_keys_limits_and_caches_of_their_own(chat_model: str, tmp_path: Path) -> None:
    with guarded(chat_model, tmp_path) as (server, keys):
        ann, bob = (httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {keys[one]}"}) for one in keys)
        assert httpx.post(f"{server.url}/v1/sessions", json={}).status_code == 401
        mine = f"/v1/sessions/{ann.post('/v1/sessions', json={}).json()['id']}"
        read = {"do": [STORY, {"gen": {"max_tokens": 1}}]}
        assert ann.post(mine, json=read).status_code == 200
        for answer in (bob.post(mine, json=read), bob.get(mine), bob.delete(mine)):
            assert answer.status_code == 404
        theirs = f"/v1/sessions/{bob.post('/v1/sessions', json={}).json()['id']}"
        first = bob.post(theirs, json=read).json()["usage"]
        assert first["computed_tokens"] == first["prompt_tokens"]  # nothing of hers was found
        again = f"/v1/sessions/{ann.post('/v1/sessions', json={}).json()['id']}"
        assert ann.post(again, json=read).json()["usage"]["saved_tokens"] > 100
        full = ann.post("/v1/sessions", json={})
        assert full.status_code == 429 and "2 of your sessions are open" in full.json()["error"]["message"]
        crowd = ann.post(mine, json={"do": [{"fork": [str(n) for n in range(40)]}]})
        assert crowd.status_code == 429 and "2000 are allowed" in crowd.json()["error"]["message"]
        ann.delete(mine)
        assert ann.post(again, json={"do": [{"fork": ["x"]}]}).status_code == 200
        state = tale.run(RemoteLLM(server.url, api_key=keys["bob"]), number=1)
        assert state["first"]
        with pytest.raises(TokenmillError, match="API key is not known"):
            tale.run(RemoteLLM(server.url, api_key="tm-wrong"), number=1)
