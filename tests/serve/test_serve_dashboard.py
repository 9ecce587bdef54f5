"""The Grafana dashboard and the alerts ask for metrics and labels that a server really has, and get answers."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from http_server import Server
from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "tokenmill.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text())
VARIABLES = {"$__rate_interval": "1m", "$__interval": "15s", "$job": ".*", "$instance": ".*"}
OF_PROMETHEUS = {"job", "instance"}  # labels that scraping adds

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|\{(?:"(?:[^"\\]|\\.)*"|[^}"])*\}|[a-zA-Z_:][\w:]*|[0-9.]+|\S')
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"')
_FUNCTIONS = {"rate", "increase", "changes", "histogram_quantile", "sum", "min", "max", "avg", "count"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def filled_in(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def panel_expressions() -> list[tuple[str, str]]:
    found = [(panel["title"], filled_in(target["expr"])) for panel in panels() for target in panel["targets"]]
    notes = [one for one in DASHBOARD["annotations"]["list"] if "expr" in one]
    return found + [(one["name"], filled_in(one["expr"])) for one in notes]


def alert_expressions() -> list[tuple[str, str]]:
    return [(rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"]]


def read_promql(expression: str) -> tuple[set[str], set[tuple[str, str]]]:
    """The metrics that an expression asks for, and (metric, label) for each label it matches or groups by."""
    metrics: set[str] = set()
    labels: set[tuple[str, str]] = set()
    grouped: list[str] = []
    words = _WORD.findall(expression)
    for at, word in enumerate(words):
        before, after = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
        if word == "by":
            grouped += [one for one in words[at + 2 : words.index(")", at)] if one != ","]
        elif word.startswith("{"):
            labels |= {(before, label) for label in _MATCHER.findall(word)}
        elif re.fullmatch(r"[a-zA-Z_:][\w:]*", word) and word not in (*grouped, "and", "or", "unless"):
            if after in ("(", "by"):
                assert word in _FUNCTIONS, f"{word} is no function that this test knows"
            else:
                metrics.add(word)
    return metrics, labels | {(metric, label) for metric in metrics for label in grouped}


def scraped(text: str) -> dict[str, set[str]]:
    """Every series of a scrape: name -> its labels."""
    series: dict[str, set[str]] = {"up": set()}  # made by Prometheus itself
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


def busy(url: str, seconds: float = 0.0) -> None:
    """Requests of every kind, right and wrong, for a while and at least once."""
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while True:
            body = {"prompt": "The mill turns and turns and turns. " * 2, "max_tokens": 12, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200
            assert client.post("/v1/completions", json={"prompt": "x", "temprature": 1}).status_code == 400
            if time.monotonic() >= end:
                return
            time.sleep(0.2)


@pytest.fixture(scope="module")
def server(chat_model: str) -> Iterator[Server]:
    """One that has all that may be shown: tiers, too."""
    server = Server.start(chat_model, "--kv-host-memory", "1000000")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def series(server: Server) -> dict[str, set[str]]:
    busy(server.url)
    return scraped(httpx.get(f"{server.url}/metrics").text)


def test_the_live_view_has_a_row_for_each_tier(server: Server, series: dict[str, set[str]]) -> None:
    """Somebody was served, so that its blocks are in host memory."""
    with httpx.stream("GET", f"{server.url}/live", timeout=30) as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    told = json.loads(line.removeprefix("data: "))
    assert set(told["tiers"]) == {"host memory"} and told["block_bytes"] > 0
    tier = told["tiers"]["host memory"]
    assert tier["room"] == 1_000_000 // told["block_bytes"] and 0 <= tier["held"] <= tier["room"]
    assert {"read", "written", "waiting", "bandwidth"} <= tier.keys()


def test_the_reader_of_promql_reads() -> None:
    metrics, labels = read_promql(
        'histogram_quantile(0.9, sum by (le, zone) (rate(a_bucket{x="1", y=~"2|3"}[5m]))) / b{z!="}"} > 3 and c'
    )
    assert metrics == {"a_bucket", "b", "c"}
    assert {("a_bucket", "x"), ("a_bucket", "y"), ("a_bucket", "le"), ("a_bucket", "zone")} <= labels


@pytest.mark.parametrize(("title", "expression"), panel_expressions() + alert_expressions())
def test_metrics_and_labels_are_there(series: dict[str, set[str]], title: str, expression: str) -> None:
    metrics, labels = read_promql(expression)
    assert metrics and metrics <= series.keys()
    for metric, label in labels:
        if label not in OF_PROMETHEUS and len(metrics) == 1:
            assert label in series[metric], f"{metric} has no label {label}"


def test_every_metric_of_ours_is_shown(series: dict[str, set[str]]) -> None:
    """A metric that nobody looks at is either missing in the dashboard or should not be there."""
    shown = {plain(metric) for _, expression in panel_expressions() for metric in read_promql(expression)[0]}
    elsewhere = {
        "tokenmill_build_info",
        "tokenmill_requests_accepted",  # those that finished and those that are active
        "tokenmill_requests_refused",  # http_errors, by reason
        "tokenmill_prompt_tokens",  # prefilled and hit tokens, as it happens
        "tokenmill_cached_tokens",
        "tokenmill_output_tokens",
    }
    assert {plain(name) for name in series if name.startswith("tokenmill_")} - shown == elsewhere


def plain(name: str) -> str:
    return re.sub(r"_(bucket|sum|count|created|total)$", "", name)


def test_the_dashboard_can_be_imported() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and DASHBOARD["id"] is None and DASHBOARD["uid"] == "tokenmill"
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong() -> None:
    for check in (["rules", "alerts.yml"], ["config", "prometheus.yml"]):
        done = subprocess.run(["promtool", "check", *check], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A real Prometheus that has watched a busy server for a while, with our rules."""
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [command, *options, f"--web.listen-address={address}", "--log.level=error"], stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
            for _ in range(300):
                try:
                    if client.get("/-/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            busy(server.url, 6.0)
            time.sleep(1.5)  # for the last scrape
            yield client
    finally:
        process.terminate()
        process.wait(30)


def asked(prometheus: httpx.Client, expression: str) -> list[Any]:
    answer = prometheus.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", answer
    found: list[Any] = answer["data"]["result"]
    return found


def test_every_panel_has_data(prometheus: httpx.Client) -> None:
    quiet = {"Engine restarts"}  # an annotation: it marks what did not happen here
    empty = [
        title for title, expression in panel_expressions() if title not in quiet and not asked(prometheus, expression)
    ]
    assert not empty


def test_the_panels_show_what_happened(prometheus: httpx.Client) -> None:
    by_title = dict(reversed(panel_expressions()))  # the first expression of each
    assert float(asked(prometheus, by_title["Ready"])[0]["value"][1]) == 1
    assert float(asked(prometheus, by_title["Output"])[0]["value"][1]) > 0
    assert 0 < float(asked(prometheus, by_title["TTFT p99"])[0]["value"][1]) < 30
    errors = asked(prometheus, by_title["Errors per second, by kind"])
    kinds = {one["metric"]["code"] for one in errors if float(one["value"][1]) > 0}
    assert kinds == {"unknown_parameter"}


def test_alerts_are_evaluated_and_silent(prometheus: httpx.Client) -> None:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == {name for name, _ in alert_expressions()}
    assert {name: rule["health"] for name, rule in rules.items() if rule["health"] != "ok"} == {}
    assert {name for name, rule in rules.items() if rule["state"] == "firing"} == set()
