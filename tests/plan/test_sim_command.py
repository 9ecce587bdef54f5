"""`tokenmill simulate`: tables, files, pictures and mistakes."""

import json
import re
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tokenmill.cli.app import app


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:00:{at // 10:02d}.{at % 10},{100 + 13 * at},{5 + at % 40}" for at in range(120)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return path


def run(*words):
    return CliRunner().invoke(app, ["simulate", *map(str, words)])


@pytest.mark.parametrize(
    "what, rows", [("policies", 5), ("routers", 5), ("splits", 7), ("failures", 4), ("budgets", 9), ("evictions", 4)]
)
def test_comparisons_make_a_row_each(trace, tmp_path, what, rows):
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    found = run(trace, "--replicas", 10, "--rate", 20, "--compare", what, "-o", out, "--plot", plot, "--rows", 300)
    assert found.exit_code == 0, found.output
    figures = json.loads(out.read_text())
    assert len(figures) == rows and all(one["requests"] == 120 for one in figures.values())
    assert len([line for line in found.stdout.splitlines() if line.startswith("|")]) == rows + 2
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")


def test_sizes_of_host_memory_are_compared(trace):
    found = run(trace, "--rate", 20, "--kv-host-memory", 8, "--compare", "tiers")
    assert found.exit_code == 0, found.output
    names = [line.split("|")[1].strip() for line in found.stdout.splitlines()[2:]]
    assert names == ["no host memory", *(f"{size} GB of host memory" for size in (1, 2, 4, 8))]
    without = run(trace, "--compare", "tiers")
    assert without.exit_code == 2 and "give --kv-host-memory" in without.output


def test_one_run_with_everything_on(trace):
    found = run(
        *(trace, "--replicas", 2, "--rate", 40, "--seconds", 5, "--fail-every", 2, "--repair", 1, "--policy", "sjf"),
        *("--autoscale", "1:6:4", "--startup", 1, "--controller", "--slo", "ttft=1s,itl=50ms", "--router", "random"),
    )
    assert found.exit_code == 0, found.output
    assert "sjf" in found.stdout


def test_failures_are_in_the_table_where_there_were_any(trace):
    calm = run(trace, "--replicas", 2)
    stormy = run(trace, "--replicas", 2, "--fail-every", 2, "--repair", 1)
    assert "failures" not in calm.stdout
    head, _, row = ([cell.strip() for cell in line.split("|")] for line in stormy.stdout.splitlines())
    found = dict(zip(head, row))
    assert int(found["failures"]) > 0 and int(found["moved"]) > 0


def test_a_log_is_told_how_far_it_is(trace, monkeypatch):
    monkeypatch.setattr("tokenmill.cli.simulate.EVERY", 0.0)
    monkeypatch.setattr("tokenmill.plan.simulator.cluster.TOLD_EVERY", 8)
    told = re.findall(r"requests simulated: (\d+) of 120", run(trace).stderr)
    assert len(told) > 5 and list(map(int, told)) == sorted(map(int, told)) and told[-1] == "120"


@pytest.mark.parametrize(
    "words, hint",
    [
        (("--policy", "best"), "fcfs, priority, sjf"),
        (("--router", "magic"), "prefix-aware"),
        (("--machine", "abacus"), "h200-8b"),
        (("--compare", "moods"), "policies"),
        (("--prefill", 1), "nobody is left"),
        (("--seconds", 5), "give both"),
        (("--autoscale", "1-4"), "LEAST:MOST:PER"),
        (("--autoscale", "4:2:8"), "MOST no fewer"),
        (("--autoscale", "1:2:0"), "PER above 0"),
        (("--compare", "splits"), "--replicas 2"),
        (("--plot", "/no/such/folder/x.svg"), "cannot be written"),
        (("--slo", "ttft=500"), "ttft=500ms or 500s"),
        (("--controller", "--slo", "ttft=1s"), "itl"),
    ],
)
def test_mistakes_are_answered_with_what_would_do(trace, words, hint):
    found = run(trace, *words)
    assert found.exit_code == 2 and hint in found.output
