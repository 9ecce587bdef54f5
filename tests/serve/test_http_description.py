"""Requests made up from the OpenAPI description never find an internal error."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from http_server import Server
from hypothesis import HealthCheck, settings

FEW, MANY = 15, 250  # examples for each endpoint
CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.fixture(scope="module")
def described(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")


def check(case: schemathesis.Case) -> None:
    body = case.body
    if isinstance(body, dict):  # else nearly every request would be for another model, and the others long
        if "model" in body:
            body["model"] = "tiny-chat"
        for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(limit), int) and body[limit] > 4:
                body[limit] = 4
        body.setdefault("deadline_ms", 2000)
    response = case.call(timeout=30)
    assert response.status_code != 500, response.text


@schema.parametrize()
@settings(max_examples=FEW, deadline=None, suppress_health_check=CHECKS)
def test_nothing_breaks_the_server(case: schemathesis.Case) -> None:
    check(case)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=MANY, deadline=None, suppress_health_check=CHECKS)
def test_nothing_at_all_breaks_the_server(case: schemathesis.Case) -> None:
    check(case)


def test_the_server_is_still_there(server: Server) -> None:
    found = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert found.status_code == 200
    assert httpx.get(f"{server.url}/health/ready").json()["restarts"] == 0
