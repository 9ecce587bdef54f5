"""Keys, tenants and their limits: who may ask, how much, and that no tenant sees another's cache."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import simulated
from sim_service import eventually, run

from tokenmill.errors import ConfigError
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.api_keys import ApiKeys, add_key, hash_of, read_tenants
from tokenmill.serve.http.tenants import Tenant, TenantLimits

PATH = "/v1/completions"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def body(prompt: list[int], tokens: int = 2, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def test_the_file_holds_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "alice", {"concurrency": 2, "priority": None})
    other = add_key(file, "alice", {})
    assert key not in file.read_text() and hash_of(key) in file.read_text()
    assert read_tenants(file) == {"alice": {"keys": [hash_of(key), hash_of(other)], "concurrency": 2}}
    assert file.stat().st_mode & 0o077 == 0
    ring = ApiKeys(file)
    assert ring.tenant_of(key) is ring.tenant_of(other) and ring.tenant_of(key).limits == TenantLimits(concurrency=2)
    for wrong in ("", None, "tm-guess", hash_of(key)):
        with pytest.raises(HttpError) as refused:
            ring.tenant_of(wrong)
        assert refused.value.status == 401


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"tenants": []}',
        '{"tenants": {"a": {}}}',
        '{"tenants": {"": {"keys": []}}}',
        '{"tenants": {"a": {"keys": ["plain"]}}}',
        '{"tenants": {"a": {"keys": [], "concurency": 3}}}',
        '{"tenants": {"a": {"keys": [], "concurrency": -3}}}',
        '{"tenants": {"a": {"keys": [], "priority": "urgent"}}}',
        '{"tenants": {"a": {"keys": [], "priority": ["api"]}}}',
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ConfigError):
        ApiKeys(file)


def test_a_changed_file_is_read_anew_and_a_broken_one_is_not(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    first = add_key(file, "alice", {"concurrency": 1})
    ring = ApiKeys(file, clock)
    alice = ring.tenant_of(first)
    alice.enter()
    second = add_key(file, "bob", {})
    clock.now += 2
    assert ring.tenant_of(second).name == "bob"
    assert ring.tenant_of(first) is alice  # still with what it uses
    file.write_text("{")
    os.utime(file, ns=(1, 1))
    clock.now += 2
    assert ring.tenant_of(second).name == "bob"
    file.write_text(json.dumps({"tenants": {"bob": read_back(second)}}))
    clock.now += 2
    with pytest.raises(HttpError):
        ring.tenant_of(first)


def read_back(key: str) -> dict[str, Any]:
    return {"keys": [hash_of(key)]}


def test_requests_per_minute() -> None:
    clock = Clock()
    tenant = Tenant("a", TenantLimits(requests_per_minute=60), clock=clock)
    for _ in range(60):
        tenant.enter()
        tenant.leave(0)
    with pytest.raises(HttpError) as refused:
        tenant.enter()
    assert refused.value.status == 429 and refused.value.retry_after == pytest.approx(1.0)
    clock.now += 1.0
    tenant.enter()
    with pytest.raises(HttpError):
        tenant.enter()


def test_tokens_per_minute_are_paid_afterwards() -> None:
    clock = Clock()
    tenant = Tenant("a", TenantLimits(tokens_per_minute=600), clock=clock)
    tenant.enter()
    tenant.leave(1200)
    with pytest.raises(HttpError) as refused:
        tenant.enter()
    assert refused.value.retry_after == pytest.approx(60.1)
    clock.now += 60.2
    tenant.enter()


def test_salts_keep_tenants_apart() -> None:
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), ("a", None), ("b", None)]
    assert len({Tenant(name).salt(asked) for name, asked in pairs}) == len(pairs)
    assert Tenant("a").salt(None) == Tenant("a").salt("")
    assert Tenant("", salted=False).salt("mine") == "mine"


def test_a_tenant_has_no_more_urgent_class_than_its_own() -> None:
    tenant = Tenant("a", TenantLimits(priority="batch"))
    assert tenant.priority(None) == 2 and tenant.priority("batch") == "batch"
    for asked in ("realtime", "api", 0, -5):
        with pytest.raises(HttpError) as refused:
            tenant.priority(asked)
        assert refused.value.status == 403
    assert Tenant("b").priority(None) == 1 and Tenant("b").priority("realtime") == "realtime"


def test_keys_over_http(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob = add_key(file, "alice", {"concurrency": 1}), add_key(file, "bob", {})

    async def main() -> None:
        around = simulated({"step": 0.01}, http={"keys": file})
        async with around as (service, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
            for headers in ({}, bearer("tm-wrong"), {"authorization": f"Basic {alice}"}):
                refused = await client.post(PATH, json=body([1]), headers=headers)
                assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
                assert (await client.get("/v1/models", headers=headers)).status_code == 401
            assert (await client.get("/health/ready")).status_code == 200
            assert (await client.get("/v1/models", headers=bearer(bob))).status_code == 200
            anthropic = await client.post("/v1/messages", json={})
            assert anthropic.json()["error"]["type"] == "authentication_error"
            assert (await client.get("/v1/models", headers={"x-api-key": bob})).status_code == 200

            long = asyncio.create_task(client.post(PATH, json=body([1, 2], 300), headers=bearer(alice)))
            await eventually(lambda: service.stats().active == 1)
            second = await client.post(PATH, json=body([1]), headers=bearer(alice))
            assert second.status_code == 429 and int(second.headers["retry-after"]) >= 1
            assert (await client.post(PATH, json=body([1]), headers=bearer(bob))).status_code == 200
            assert (await long).status_code == 200
            assert (await client.post(PATH, json=body([1]), headers=bearer(alice))).status_code == 200

    run(main())


def test_no_tenant_sees_anothers_cache(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob = add_key(file, "alice", {}), add_key(file, "bob", {})
    prompt = list(range(1, 100))

    async def cached(client: httpx.AsyncClient, key: str, **more: Any) -> int:
        answer = await client.post(PATH, json=body(prompt, **more), headers=bearer(key))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def main() -> None:
        async with simulated(http={"keys": file}) as (_, url), httpx.AsyncClient(base_url=url) as client:
            assert await cached(client, alice) == 0
            assert await cached(client, alice) > 0
            assert await cached(client, bob) == 0
            assert await cached(client, bob, cache_salt="alice") == 0
            assert await cached(client, alice, cache_salt="other") == 0

    run(main())


def test_a_tenant_has_its_own_cache_wiped_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob = add_key(file, "alice", {}), add_key(file, "bob", {})

    async def cached(client: httpx.AsyncClient, key: str, **more: Any) -> int:
        answer = await client.post(PATH, json=body(list(range(1, 100)), **more), headers=bearer(key))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def reset(client: httpx.AsyncClient, key: str, **more: Any) -> int:
        return (await client.post("/reset_prefix_cache", json=more, headers=bearer(key))).status_code

    async def main() -> None:
        async with simulated(http={"keys": file}) as (_, url), httpx.AsyncClient(base_url=url) as client:
            for key in (alice, bob):
                await cached(client, key)
                await cached(client, key, cache_salt="diary")
            assert await reset(client, "tm-wrong") == 401
            assert await reset(client, alice, cache_salt="s" * 2000) == 400
            assert await reset(client, alice) == 200
            assert await cached(client, alice, cache_salt="diary") > 0
            assert await cached(client, alice) == 0
            assert await reset(client, alice, cache_salt="diary") == 200
            assert await cached(client, alice, cache_salt="diary") == 0
            assert await cached(client, bob) > 0 and await cached(client, bob, cache_salt="diary") > 0

    run(main())
