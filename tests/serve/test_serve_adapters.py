"""Adapters over HTTP: named as models, loaded and unloaded while the server runs, there again after a killed engine."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server, http_around
from sim_service import COMMAND, greedy, run, strike

sys.path.append(str(Path(__file__).parents[1] / "adapters"))
from peft_folders import write_adapter, write_base

from tokenmill import LLM, SamplingParams
from tokenmill.cli.serve import _adapters
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, InvalidRequest, TokenmillError
from tokenmill.model.marked_text import Marks
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client import adapters as remote_adapters
from tokenmill.serve.engine_client.adapters import KnownAdapter, RemoteAdapters
from tokenmill.serve.engine_client.remote_engine import EngineLoss
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.engine_client.text_pool import LONG
from tokenmill.serve.http.api_keys import add_key
from tokenmill.serve.settings import ServeSettings

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "max_model_len": 400}
PROMPT = [9, 10, 11] * 6
NAMES = ("", "one", "two")


@dataclass(frozen=True)
class Folders:
    base: str
    allowed: Path
    expected: dict[str, list[int]]  # what each says


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    at = tmp_path_factory.mktemp("served-adapters")
    base, allowed = str(write_base(at / "base")), at / "allowed"
    for seed, name in enumerate(NAMES[1:]):
        write_adapter(allowed / name, seed=seed)
    write_adapter(at / "outside")
    (allowed / "link").symlink_to(at / "outside")
    (allowed / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (allowed / "files" / name).symlink_to(at / "outside" / name)
    with LLM(base, enable_lora=True, **OPTIONS) as llm:
        for name in NAMES[1:]:
            llm.load_adapter(name, allowed / name)
        params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        said = {name: llm.generate([PROMPT], params, False, adapter=name)[0].outputs[0].token_ids for name in NAMES}
    return Folders(base, allowed, said)


@pytest.fixture(scope="module")
def server(folders: Folders) -> Iterator[Server]:
    one = Server.start(
        folders.base, "--load-format", "safetensors", "--dtype", "float32", "--skip-tokenizer-init", "--enable-lora",
        "--max-loras", "1", "--lora-modules", f"one={folders.allowed / 'one'}", "--lora-dir", str(folders.allowed),
    )  # fmt: skip
    yield one
    assert one.stop() == 0


def body(model: str | None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return (
        {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        | named
        | more
    )


def test_models_and_adapters_answer_by_their_names(server: Server, folders: Folders) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert list(listed) == ["base", "one"] and listed["one"]["parent"] == "base"
        assert client.get("/v1/models/one").json()["id"] == "one"
        missing = client.post("/v1/completions", json=body("two"))
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "two", "lora_int_id": 2})
        assert loaded.status_code == 200 and "'two' added successfully" in loaded.text
        for model in (None, "one", "two", "one", None):
            answer = client.post("/v1/completions", json=body(model)).json()
            assert answer["model"] == (model or "base")
            assert answer["usage"]["completion_tokens"] == 8
        again = client.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "two"})
        assert again.status_code == 400 and "already been loaded" in again.json()["error"]["message"]
        inplace = {"lora_name": "two", "lora_path": "one", "load_inplace": True}
        assert client.post("/v1/load_lora_adapter", json=inplace).status_code == 200
        metrics = client.get("/metrics").text
        assert "tokenmill_adapters 2.0" in metrics and "tokenmill_adapters_on_device 1.0" in metrics
        assert "tokenmill_adapter_evictions_total" in metrics
        gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
        assert gone.status_code == 200 and "removed successfully" in gone.text
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 404
        assert client.post("/v1/completions", json=body("two")).status_code == 404


@pytest.mark.parametrize("path", ["../outside", "/etc", "link", "files", ".", "", "\0", "one/../.."])
def test_only_folders_below_the_allowed_one_are_read(server: Server, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        refused = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
        assert refused.status_code == 403 and "below the server's --lora-dir" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("name", "said"), [("base", "a name that no model has"), ("", "a name"), ("a\nb", "a name")])
def test_names_are_checked(server: Server, name: str, said: str) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        refused = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "one"})
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_a_bad_adapter_is_refused_and_the_others_go_on(server: Server, folders: Folders) -> None:
    (write_adapter(folders.allowed / "bad") / "adapter_model.safetensors").write_bytes(b"no")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        refused = client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": "bad"})
        assert refused.status_code == 400 and "truncated or corrupt" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json=body("one")).status_code == 200


def test_tenants_have_their_adapters_and_operators_load_them(folders: Folders, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    of_one, of_all = add_key(keys, "narrow", {"adapters": ["one"]}), add_key(keys, "wide", {"operator": True})
    assert json.loads(keys.read_text())["tenants"]["narrow"]["adapters"] == ["one"]

    async def main() -> None:
        modules = tuple((name, str(folders.allowed / name)) for name in NAMES[1:])
        service = Service(
            EngineConfig(model=folders.base, enable_lora=True, **OPTIONS), ServeSettings(lora_modules=modules)
        )
        await service.start()
        try:
            async with (
                http_around(service, keys=keys, lora_dir=folders.allowed) as url,
                httpx.AsyncClient(base_url=url, timeout=120) as client,
            ):
                seen = {}
                for key in (of_one, of_all):
                    head = {"authorization": f"Bearer {key}"}
                    listed = (await client.get("/v1/models", headers=head)).json()["data"]
                    asked = await client.post("/v1/completions", json=body("two"), headers=head)
                    loaded = await client.post(
                        "/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "two"}, headers=head
                    )
                    seen[key] = [one["id"] for one in listed], asked.status_code, loaded.status_code
                assert seen[of_one] == (["base", "one"], 404, 403)
                assert seen[of_all] == (["base", "one", "two"], 200, 200)
            async with http_around(service) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
                closed = await client.post("/v1/load_lora_adapter", json={"lora_name": "n", "lora_path": "two"})
                assert closed.status_code == 403 and "--lora-dir" in closed.json()["error"]["message"]
        finally:
            await service.stop()

    run(main())


def test_a_killed_engine_has_its_adapters_again_and_streams_go_on(folders: Folders) -> None:
    async def main() -> None:
        modules = tuple((name, str(folders.allowed / name)) for name in NAMES[1:])
        config = EngineConfig(model=folders.base, enable_lora=True, max_loras=1, **OPTIONS)
        service = Service(config, ServeSettings(lora_modules=modules, backoff_seconds=0))
        await service.start()
        try:
            params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
            streams = {name: await service.submit(PROMPT, params, adapter=name) for name in NAMES}
            async for output in streams["one"]:
                if len(output.outputs[0].token_ids) > 20:
                    break
            await strike(service, signal.SIGKILL)
            for name, stream in streams.items():
                output = await stream.last()
                assert output.error is None and list(output.outputs[0].token_ids) == folders.expected[name], name
            assert service.stats().restarts == 1 and set(service.adapters.known) == {"one", "two"}
        finally:
            await service.stop()

    run(main())


def test_an_adapter_that_is_other_files_after_a_crash_is_gone(folders: Folders, tmp_path: Path) -> None:
    async def main() -> None:
        folder = write_adapter(tmp_path / "changing", seed=8)
        config = EngineConfig(model=folders.base, enable_lora=True, **OPTIONS)
        service = Service(config, ServeSettings(lora_modules=(("changing", str(folder)),), backoff_seconds=0))
        await service.start()
        try:
            write_adapter(folder, seed=9)
            await strike(service, signal.SIGKILL)
            few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            output = await (await service.submit(PROMPT, few)).last()
            assert output.error is None
            while service.adapters.known:
                await asyncio.sleep(0.01)
            stream = await service.submit(PROMPT, few, adapter="changing")
            output = await stream.last()
            assert output.error is not None and "there is no adapter 'changing'" in output.error
        finally:
            await service.stop()

    run(main())


def test_a_module_that_cannot_be_loaded_ends_the_start_with_its_sentence(folders: Folders) -> None:
    async def main() -> None:
        config = EngineConfig(model=folders.base, enable_lora=True, **OPTIONS)
        service = Service(config, ServeSettings(lora_modules=(("no", "/nowhere"),)))
        try:
            with pytest.raises(InvalidRequest, match="no adapter to read at '/nowhere"):
                await service.start()
        finally:
            await service.stop()

    run(main())


class Front:
    """A service whose engine is this: it hears what is sent, and says what it is told to."""

    def __init__(self, *modules: str) -> None:
        config = EngineConfig(model="none", skip_tokenizer_init=True, enable_lora=True)
        self.service = Service(config, ServeSettings(lora_modules=tuple((name, name) for name in modules)))
        self.sent: list[Any] = []

    def attach(self) -> None:
        ready = wire.EngineReady(wire.VERSION, 1, 1000, 1000, (2,), 64, 1000, "none", [])
        self.service.engine_ready(ready, self.sent.append)

    def load(self, key: str) -> None:
        self.service.adapters.known["one"] = KnownAdapter(Path("one"), key, 0.0)

    def submitted(self) -> list[str]:
        """The adapters of the requests that were sent since the last call."""
        names = [one.adapter for one in self.sent if isinstance(one, wire.Submit)]
        self.sent.clear()
        return names

    def say(self, stream: Stream) -> None:
        update = wire.SequenceUpdate(self.service._remote._keys[stream.request_id], [5])
        self.service.engine_stepped(wire.StepDone(1, 0.0, 0.0, 0, 0, [update]))

    def lose(self) -> None:
        self.service.engine_lost(EngineLoss("it was killed"))
        self.attach()


def test_no_answer_changes_its_adapter_in_the_middle() -> None:
    async def main() -> None:
        front = Front()
        front.attach()
        front.load("old")
        begun, waiting, base = [await front.service.submit([7], greedy(5), adapter=name) for name in ("one", "one", "")]
        front.say(begun)
        front.say(base)
        assert front.submitted() == ["one", "one", ""]
        front.lose()  # the same adapter as before: all go on
        assert sorted(front.submitted()) == ["", "one", "one"]
        front.load("new")
        front.say(base)
        assert not begun.request_state.finished
        front.lose()
        output = await asyncio.wait_for(begun.last(), 5)
        assert output.error is not None and "its adapter was replaced" in output.error
        assert sorted(front.submitted()) == ["", "one"] and not waiting.request_state.finished
        front.say(waiting)  # it has begun with the new one
        front.lose()
        assert sorted(front.submitted()) == ["", "one"] and not waiting.request_state.finished

    run(main())


def test_what_was_sent_while_its_adapter_was_replaced_may_be_either() -> None:
    async def main() -> None:
        front = Front()
        front.attach()
        front.load("old")
        before = await front.service.submit([7], greedy(5), adapter="one")
        loading = asyncio.create_task(front.service.adapters.load("one", Path("two")))
        await asyncio.sleep(0)
        between = await front.service.submit([7], greedy(5), adapter="one")
        front.say(before)
        front.say(between)
        front.lose()
        with pytest.raises(TokenmillError, match="try again later"):
            await loading
        output = await asyncio.wait_for(between.last(), 5)
        assert output.error is not None and "its adapter was replaced" in output.error
        assert not before.request_state.finished  # the old one is there again

    run(main())


def test_an_end_that_another_one_brings_about_is_told_without_a_step() -> None:
    """One is suspected of killing engines and runs alone; the other's adapter is replaced meanwhile."""

    async def main() -> None:
        front = Front()
        front.attach()
        front.load("old")
        suspect, other = [await front.service.submit([7], greedy(5), adapter=name) for name in ("", "one")]
        front.say(other)
        for _ in range(2):
            key = front.service._remote._keys[suspect.request_id]
            front.service.engine_lost(EngineLoss("it crashed", in_flight=(key,)))
            front.submitted()
            front.attach()
        assert front.submitted() == [""]
        front.load("new")
        front.service.cancel(suspect.request_id)
        output = await asyncio.wait_for(other.last(), 5)
        assert output.error is not None and "its adapter was replaced" in output.error

    run(main())


def test_until_its_modules_are_loaded_a_server_is_starting() -> None:
    async def main() -> None:
        front = Front("one")
        async with http_around(front.service) as url, httpx.AsyncClient(base_url=url) as client:
            for attach in (lambda: None, front.attach):
                attach()
                for model in ("one", None):
                    refused = await client.post("/v1/completions", json=body(model))
                    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
                assert (await client.get("/health")).status_code == 503
        front.service._modules = ()  # as `start` does then
        front.lose()
        assert front.service.ready()

    run(main())


def test_an_adapter_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _adapters(["one=x"], ["base"]) == (("one", "x"),)
    with pytest.raises(ConfigError, match="base is the model"):
        _adapters(["one=x", "base=x"], ["default", "base"])

    async def main() -> None:
        config = EngineConfig(model="{}", skip_tokenizer_init=True, enable_lora=True)
        service = Service(config, ServeSettings(command=COMMAND, lora_modules=(("sim", "x"),)))
        try:
            with pytest.raises(ConfigError, match="'sim' has the name of the model"):
                await service.start()
        finally:
            await service.stop()
        monkeypatch.setattr(remote_adapters, "MOST_ADAPTERS", 1)
        many = RemoteAdapters()
        many.attach(lambda message: None)
        many.known["one"] = KnownAdapter(Path("one"), "key", 0.0)
        with pytest.raises(InvalidRequest, match="unload one first"):
            await many.load("two", Path("two"))

    run(main())


def test_long_modules_are_read_where_long_texts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        front, sizes = Front(), list[int]()
        front.attach()

        async def note(size: int, *args: Any, **options: Any) -> list[int]:
            sizes.append(size)
            return []

        monkeypatch.setattr(front.service.texts, "run", note)
        marks = Marks()
        part = {"type": "text", "text": "x" * (LONG + 1), "cache_module": True}
        await front.service.prompts.chat_prompt([{"role": "user", "content": marks.take_out([part])}], marks)
        assert sizes[0] > LONG

    run(main())
