"""The comparison of engines on a CPU, with pretended engines: turns, failures, the arithmetic of the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenmill.bench.cpu import (
    DECODE,
    DECODE_CPU,
    PEAK,
    PREFILL,
    PREFILL_CPU,
    ContenderFigures,
    Setup,
    batch_column,
    batch_cpu_column,
    compare,
    prompts,
)
from tokenmill.bench.cpu_scaling import draw, scaling
from tokenmill.bench.cpu_table import machine, notes, table
from tokenmill.bench.peers import KINDS, Contender, contenders
from tokenmill.bench.peers.host import SERVE, PeerWorker, WorkerFailed
from tokenmill.bench.peers.serve import clock_of
from tokenmill.bench.plot import Series, chart
from tokenmill.cli.app import app
from tokenmill.errors import ConfigError

# An engine in place of serve.py: answers by the rules, with times that a test can foresee, and says whose turn it was.
FAKE = """
import json, os, sys, time
driver, threads = sys.argv[1], int(sys.argv[2])
speed = {"on_tokenmill": 2.0, "on_llama_cpp": 1.0}.get(driver, 0.5)
for line in sys.stdin:
    ask = json.loads(line)
    with open(LOG, "a") as log:
        print(driver, ask["command"], len(ask.get("prompts", ask.get("prompt", []))), threads, os.getpid(), file=log)
    command = ask["command"]
    if command == "prepare":
        answer = {"model": ask["source"] + "." + ask["variant"]}
    elif command == "load":
        answer = {"version": "fake " + driver}
    elif command == "single":
        first = len(ask["prompt"]) / (100 * speed * threads)
        times = [first + n / (10 * speed * threads) for n in range(ask["new"])]
        answer = {"tokens": [7] * ask["new"], "times": times, "cpu": [threads * one for one in times], "spent": 3}
    elif command == "batch":
        answer = {"tokens": [[7] * ask["new"]] * len(ask["prompts"]), "seconds": ask["new"] / speed}
        answer["cpu"] = threads * answer["seconds"]
    elif command == "peak":
        answer = {"bytes": 50_000_000 / speed}
    BAD
    print(json.dumps(answer), flush=True)
"""
OURS, LLAMA, VLLM = Contender("tokenmill", "as is"), Contender("llama.cpp", "q4_0"), Contender("vllm", "float32")
WHO = [OURS, LLAMA, VLLM]
NO_LLAMA = ["--against", "llama.cpp:q4_0", "--peer", "llama.cpp=/no/python"]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(
        model=tmp_path / "model.gguf",
        vocab=1000,
        forms=tmp_path / "forms",
        pythons={"tokenmill": sys.executable, "llama.cpp": sys.executable, "vllm": sys.executable},
        threads=2,
        rounds=2,
        prompt=64,
        new=5,
        requests=(3,),
        timeout=120,
        serve=write_fake(tmp_path),
    )


def write_fake(folder: Path, bad: str = "pass") -> Path:
    path = folder / "fake.py"
    path.write_text(FAKE.replace("BAD", bad).replace("LOG", repr(str(folder / "log.txt"))))
    return path


def asked(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log.txt").read_text().splitlines()]


def quiet(line: str) -> None:
    pass


def test_figures_are_what_the_workers_timed(setup: Setup) -> None:
    ours, llama, _ = compare(setup, WHO, quiet)
    assert ours.median(PREFILL) == pytest.approx(400) and llama.median(PREFILL) == pytest.approx(200)
    assert ours.median(DECODE) == pytest.approx(40) and llama.median(DECODE) == pytest.approx(20)
    assert ours.median(batch_column(3)) == pytest.approx(6) and llama.median(batch_column(3)) == pytest.approx(3)
    assert ours.median(PREFILL_CPU) == pytest.approx(200) and ours.median(DECODE_CPU) == pytest.approx(
        20
    )  # two threads
    assert llama.median(batch_cpu_column(3)) == pytest.approx(1.5) and llama.figures["cold_cpu"] == [3, 3]
    assert ours.median(PEAK) == pytest.approx(25) and len(ours.figures["cold"]) == setup.rounds
    assert (llama.model, llama.version) == (str(setup.model) + ".q4_0", "fake on_llama_cpp")


def test_the_line_after_a_round_has_the_medians_of_that_round(setup: Setup, tmp_path: Path) -> None:
    bad = """if command == "single":
        turns = globals().setdefault("turns", []); turns.append(1)
        answer["times"] = [one * (1, 1, 4, 2, 1)[len(turns) - 1] for one in answer["times"]]  # cold, untimed, timed"""
    said: list[str] = []
    (row,) = compare(replace(setup, serve=write_fake(tmp_path, bad), rounds=1), WHO[:1], said.append)
    assert row.figures["decode"] == pytest.approx([10, 20, 40]) and row.median(DECODE) == pytest.approx(20)
    assert any("prefill tok/s 200, decode tok/s 20," in line for line in said), said


def test_weights_that_are_taken_as_they_are_have_their_form_beside_them(setup: Setup) -> None:
    rows = compare(replace(setup, form="Q4_1", rounds=1), WHO[:2], quiet)
    assert [line.split(" |")[0] for line in table(setup.columns, rows)[2:4]] == [
        "| tokenmill as is (Q4_1)",
        "| llama.cpp q4_0",
    ]
    assert notes(rows)[0] == "tokenmill as is (Q4_1): fake on_tokenmill"


def test_contenders_take_turns_within_every_column(setup: Setup, tmp_path: Path) -> None:
    compare(setup, WHO, quiet)
    batches = [line[0] for line in asked(tmp_path) if line[1] == "batch" and line[2] == "3"]
    turn = ["on_tokenmill"] * 2 + ["on_llama_cpp"] * 2 + ["on_vllm"] * 2  # warm, then timed
    assert batches == turn * setup.rounds
    singles = [line[0] for line in asked(tmp_path) if line[1] == "single" and line[2] == "16"]
    assert singles == ["on_tokenmill", "on_llama_cpp", "on_vllm"] * setup.rounds


def test_every_round_starts_new_processes_and_ends_them(setup: Setup, tmp_path: Path) -> None:
    compare(setup, WHO, quiet)
    numbers = {int(line[4]) for line in asked(tmp_path)}
    assert len(numbers) == len(WHO) * (setup.rounds + 1)
    assert not any(Path(f"/proc/{number}").exists() for number in numbers)


def test_what_there_is_can_be_kept_after_each_round(setup: Setup) -> None:
    kept: list[int] = []
    compare(setup, WHO, quiet, lambda rows: kept.append(len(rows[0].figures["batch3"])))
    assert kept == [1, 2]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('if (driver, command) == ("on_llama_cpp", "batch"): print("boom", file=sys.stderr); sys.exit(3)', "boom"),
        ('if (driver, command) == ("on_llama_cpp", "batch"): os.kill(os.getpid(), 9)', "signal 9"),
        ('if (driver, command) == ("on_llama_cpp", "batch"): time.sleep(60)', "no answer within 4 s"),
        ('if (driver, command) == ("on_llama_cpp", "batch"): answer = {"error": "too large"}', "too large"),
        ('if (driver, command) == ("on_llama_cpp", "batch"): answer["tokens"].pop()', "did not come"),
        ('if (driver, command) == ("on_llama_cpp", "batch"): print("{half", flush=True)', "no JSON"),
    ],
)
def test_a_peer_that_fails_does_not_stop_the_others(setup: Setup, tmp_path: Path, bad: str, reason: str) -> None:
    said: list[str] = []
    seconds = 4 if "4 s" in reason else setup.timeout
    rows = compare(replace(setup, serve=write_fake(tmp_path, bad), timeout=seconds), WHO, said.append)
    ours, llama, vllm = rows
    assert llama.failure is not None and reason in llama.failure
    assert any(reason in line for line in said)
    assert ours.failure is None and vllm.failure is None and len(vllm.figures["batch3"]) == setup.rounds
    assert llama.median(DECODE) == pytest.approx(20)  # what it did before stays
    assert "| llama.cpp q4_0 | 200 (200-200) | 20.0 (20.0-20.0) | - |" in "\n".join(table(setup.columns, rows))
    assert any(reason in line for line in notes(rows))
    assert not any(Path(f"/proc/{line[4]}").exists() for line in asked(tmp_path))


def test_an_environment_that_is_not_there_is_named(setup: Setup) -> None:
    rows = compare(replace(setup, pythons=setup.pythons | {"vllm": "/no/python"}), WHO, quiet)
    assert "/no/python cannot be run" in str(rows[2].failure)


def test_a_worker_that_never_began_is_reported_and_can_be_closed() -> None:
    worker = PeerWorker("/bin/false", "-", 1, name="false")
    worker._process.wait()  # so that the question finds nobody
    with pytest.raises(WorkerFailed, match="ended with code 1"):
        worker.ask("prepare", 20, prompts=[[1] * 100_000])
    worker.close()


def test_frozen_workers_do_not_run(tmp_path: Path) -> None:
    spin = tmp_path / "spin.py"
    spin.write_text("print('{}', flush=True)\nwhile True: pass")
    worker = PeerWorker(sys.executable, "-", 1, name="spin", serve=spin)
    try:
        worker.ask("anything", 20)
        worker.freeze()
        time.sleep(0.05)
        before = _cpu_time(worker)
        time.sleep(0.3)
        assert _cpu_time(worker) == before
        worker.thaw()
        deadline = time.monotonic() + 60
        while _cpu_time(worker) == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process knows its own time only")
def test_time_of_the_cpu_counts_work_and_not_waiting_and_that_of_other_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        both, own = clock_of([os.getpid(), child.pid]), clock_of([os.getpid()])
        began = both(), own()
        deadline = time.monotonic() + 300
        while both()[1] - began[0][1] < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ended = own()
        assert ended[1] - began[1][1] < 0.1 < ended[0] - began[1][0]
    finally:
        child.kill()
        child.wait()


def _cpu_time(worker: PeerWorker) -> int:
    fields = Path(f"/proc/{worker._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_no_prompt_comes_twice_and_all_contenders_get_the_same(setup: Setup) -> None:
    one = prompts(setup, 3, 64, "single", 0)
    assert one == prompts(setup, 3, 64, "single", 0)
    others = [*one, *prompts(setup, 3, 64, "single", 1), *prompts(setup, 3, 64, "batch", 0, 3)]
    assert len({tuple(prompt[:8]) for prompt in others}) == len(others)
    assert all(0 < token < setup.vocab and len(prompt) == 64 for prompt in one for token in prompt)


def test_the_table_compares_with_the_best_peer_of_each_column() -> None:
    rows = [ContenderFigures(OURS), ContenderFigures(LLAMA), ContenderFigures(VLLM)]
    for row, decode, peak in zip(rows, (30.0, 20.0, 10.0), (300.0, 400.0, 200.0)):
        row.add(DECODE, decode - 1)
        row.add(DECODE, decode)
        row.add(DECODE, decode + 5)
        row.add(PEAK, peak)
    lines = table([DECODE, PEAK, PREFILL], rows)
    assert lines[2] == "| tokenmill as is | 30.0 (29.0-35.0) | 300 | - |"
    assert lines[-1] == "| tokenmill / best peer | 1.50x llama.cpp q4_0 | 1.50x vllm float32 | - |"
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_without_peers_has_no_ratio() -> None:
    row = ContenderFigures(OURS)
    row.add(DECODE, 1)
    assert len(table([DECODE], [row])) == 3


def test_notes_say_how_far_answers_agree() -> None:
    rows = [
        ContenderFigures(OURS, tokens=[1, 2, 3, 4]),
        ContenderFigures(LLAMA, tokens=[1, 2, 9, 4]),
        ContenderFigures(VLLM, tokens=[1, 2, 3, 4]),
    ]
    assert [line.split(": ")[1] for line in notes(rows)[1:]] == [
        "first 2 of 4 tokens as ours",
        "first 4 of 4 tokens as ours",
    ]


def test_against_names_engines_and_forms() -> None:
    assert contenders("") == [OURS]
    assert contenders("llama.cpp:q4_0, vllm:float32") == WHO
    assert [one.variant for one in contenders("llama.cpp")[1:]] == list(KINDS["llama.cpp"].variants)
    for wrong in ("llama", "llama.cpp:q9", "vllm,vllm", "tokenmill"):
        with pytest.raises(ConfigError, match="--against"):
            contenders(wrong)


def test_scaling_uses_each_thread_count_and_context(setup: Setup, tmp_path: Path) -> None:
    results = scaling(setup, WHO[:2], (32, 128), quiet)
    assert {threads: rows[0].median(DECODE) for threads, rows in results.threads.items()} == pytest.approx(
        {1: 20, 2: 40}
    )
    assert {line[3] for line in asked(tmp_path)} == {"1", "2"}
    prefill, decode = results.contexts[128]["llama.cpp q4_0"]
    assert prefill == pytest.approx(200) and decode == pytest.approx(50)
    assert json.dumps(results.as_dict())
    drawn = draw(results, setup.columns, tmp_path / "plots")
    assert [path.name for path in drawn] == [
        "cpu_threads_prefill.svg",
        "cpu_threads_decode.svg",
        "cpu_threads_batch3.svg",
        "cpu_context_prefill.svg",
        "cpu_context_decode.svg",
    ]
    assert "llama.cpp q4_0" in drawn[-1].read_text()
    with pytest.raises(ConfigError, match="shortest context"):
        scaling(setup, WHO, (8,), quiet)


def test_a_chart_keeps_points_inside_and_names_apart() -> None:
    lines = [Series(f"<{number}>", [(128, 1.0), (8192, 3.0 + number / 100)]) for number in range(8)]
    root = ElementTree.fromstring(chart("a & b", "x", lines, logarithmic=True))
    width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
    circles = [item for item in root.iter() if item.tag.endswith("circle")]
    assert all(0 < float(one.attrib["cx"]) < width and 0 < float(one.attrib["cy"]) < height for one in circles)
    names = {item.text: float(item.attrib["y"]) for item in root.iter() if (item.text or "").startswith("<")}
    places = sorted(names.values())
    assert len(names) == 8 and min(after - before for before, after in pairwise(places)) > 12
    ticks = [item.text for item in root.iter() if item.tag.endswith("text") and item.attrib.get("text-anchor") == "end"]
    assert ticks[0] == "0" and float(ticks[-1] or 0) >= 3.07


def test_a_chart_of_nothing_is_still_a_chart() -> None:
    ElementTree.fromstring(chart("empty", "x", [Series("none", []), Series("zero", [(1, 0)])]))


def test_the_command_measures_this_engine_and_writes_the_figures(default_model: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    words = ["bench", "cpu", "-m", default_model, "--rounds", "1", "--prompt", "8", "--new", "4", "--requests", "2"]
    result = CliRunner().invoke(app, [*words, "--threads", "1", "-o", str(out), *NO_LLAMA])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    ours, llama = written["rows"]
    assert ours["failure"] is None and all(
        ours["figures"][key] for key in ("prefill", "decode", "batch2", "cold", "peak", "prefill_cpu", "batch2_cpu")
    )
    assert len(ours["tokens"]) == 4 and "/no/python cannot be run" in llama["failure"]
    assert "| tokenmill as is (Q4_1) |" in result.output and "3 single requests per round" in result.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--peer", "llama=python"], "--peer"),
        (["--peer", "vllm"], "--peer"),
        (["--requests", "16,x"], "--requests"),
        (["--against", "lama"], "--against"),
        (["--plot", "charts"], "--plot is only of use with --scaling"),
        (["--contexts", "128"], "--contexts is only of use with --scaling"),
        (["--against", "llama.cpp"], "add for example --peer llama.cpp=/"),
        (["--against", "vllm,llama.cpp", "--peer", "vllm=python"], "add for example --peer llama.cpp=/"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(tiny_model: str, words: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["bench", "cpu", "-m", tiny_model, *words])
    assert result.exit_code == 2 and reason in result.output
    assert result.output.count("\n") == 1


def test_the_worker_keeps_its_answers_apart_from_what_engines_print(tmp_path: Path) -> None:
    driver = tmp_path / "on_loud.py"
    driver.write_text(
        "import os\ndef prepare(a, b, c):\n    print('loud')\n    os.system('echo louder')\n    return c\n"
    )
    (tmp_path / "serve.py").write_text(SERVE.read_text())
    worker = PeerWorker(sys.executable, "on_loud", 1, name="loud", serve=tmp_path / "serve.py")
    try:
        assert worker.ask("prepare", 20, source="s", variant="v", folder="f") == {"model": "f"}
        peak = worker.ask("peak", 20)["bytes"]
        assert 1e6 < peak < 100e6  # its own, not that of the tests that started it
        with pytest.raises(WorkerFailed, match="AttributeError"):
            worker.ask("load", 20, model="m", variant="v", threads=1, rows=1, length=8)
        assert worker.ask("prepare", 20, source="s", variant="v", folder="g") == {"model": "g"}
    finally:
        worker.close()


def test_what_holds_the_cpu_down_is_on_the_path_of_our_worker_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "on_path.py").write_text("import os\ndef prepare(a, b, c):\n    return os.environ['PYTHONPATH']\n")
    (tmp_path / "serve.py").write_text(SERVE.read_text())
    monkeypatch.setenv("PYTHONPATH", "/held/down")
    worker = PeerWorker(sys.executable, "on_path", 1, name="tokenmill", serve=tmp_path / "serve.py")
    try:
        path = worker.ask("prepare", 120, source="s", variant="v", folder="f")["model"].split(os.pathsep)
        assert path == [str(SERVE.parents[3]), "/held/down"]
    finally:
        worker.close()


def test_a_folder_beside_the_file_is_its_safetensors(tmp_path: Path) -> None:
    beside = tmp_path / "model-1.5b"
    beside.mkdir()
    (beside / "config.json").write_text("{}")
    worker = PeerWorker(sys.executable, "on_transformers", 1, name="transformers")
    try:
        question = {"source": f"{beside}.gguf", "variant": "float32", "folder": str(tmp_path / "forms")}
        assert worker.ask("prepare", 120, **question) == {"model": str(beside)}
    finally:
        worker.close()


def test_features_of_an_arm_cpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\nFeatures\t: fp asimd crc32 asimddp\n")
    assert machine()["features"] == ["asimd", "asimddp"]
