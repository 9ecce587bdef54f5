"""Requests made up from the OpenAPI description never find an internal error."""

from __future__ import annotations

from collections import Counter

import httpx
import pytest
import schemathesis
from http_server import Server
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]


def bounded(case: schemathesis.Case) -> None:
    """Else nearly every request would be for another model, and the others long."""
    body = case.body
    if not isinstance(body, dict):
        return
    if "model" in body:
        body["model"] = "tiny-chat"
    for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(limit), int) and body[limit] > 4:
            body[limit] = 4
    if case.path == "/v1/sessions":  # nobody closes these, and other tests look for what is left
        lease = body.setdefault("lease_seconds", 1)
        body["lease_seconds"] = 1 if isinstance(lease, int | float) and lease > 1 else lease


def try_all(server: Server, examples: int) -> Counter[int]:
    """Right and wrong requests to every endpoint; counts the answers by status."""
    statuses: Counter[int] = Counter()
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in description.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not list(operation.body):
                continue  # there is nothing that could be wrong

            @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=CHECKS)
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                bounded(case)
                response = case.call(timeout=60)
                statuses[response.status_code] += 1
                assert response.status_code != 500, response.text

            ask()
    assert httpx.get(f"{server.url}/health/ready").json()["restarts"] == 0
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    return statuses


def test_nothing_breaks_the_server(server: Server) -> None:
    statuses = try_all(server, examples=10)
    assert statuses[200] > 20 and statuses[400] > 50


@pytest.mark.slow
def test_nothing_at_all_breaks_the_server(server: Server) -> None:
    assert try_all(server, examples=100)[200] > 200
