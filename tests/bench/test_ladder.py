"""The ladder: one switch per rung, answers held against the bottom's, and figures that can be traced."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny
from typer.testing import CliRunner

from tokenmill.bench import ladder_run
from tokenmill.bench.ladder import BOUNDED, TORCH_OPS, LadderPlan, LadderSizes, Rung, fitted, requests
from tokenmill.bench.ladder_run import Exactness, RungResult, RungWorker, climb, first_differences, workers
from tokenmill.bench.ladder_show import cells, lines, page, waterfall
from tokenmill.bench.peers.host import WorkerFailed
from tokenmill.cache import native_dir
from tokenmill.cli.app import app
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.ops.native.library import library
from tokenmill.ops.registry import implementations

SIZES = LadderSizes(rows=8, max_len=256, kv_bytes=1 << 20, whole_step=2048)
TINY = ["--load-format", "dummy", "--device", "cpu", "--requests", "8", "--input", "24", "--output", "8"]


def ladder(*words: str) -> tuple[str, int]:
    result = CliRunner().invoke(app, ["ladder", *words])
    return result.output, result.exit_code


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_rung_is_the_one_below_plus_what_it_switches(device: str) -> None:
    plan = LadderPlan(device, SIZES)
    rungs = plan.rungs()
    assert len({rung.name for rung in rungs}) == len(rungs) >= 12
    known, defaults = {field.name for field in fields(EngineConfig)}, vars(EngineConfig())
    before = plan.settings(rungs[0].name)
    for rung in rungs[1:]:
        now = plan.settings(rung.name)
        EngineConfig.from_options(**now)
        changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        assert changed == set(rung.switch) - {name for name in rung.switch if before.get(name) == now.get(name)}
        assert changed and changed <= known
        before = now
    on_top = {"kv_cache", "batching", "kv_reservation", "enable_chunked_prefill", "enable_prefix_caching"}
    on_top |= {"cuda_graphs", "ops"}
    on_top |= {"overlap", "shared_prefix_attention"} if device == "cuda" else {"speculation"}
    for name in on_top:  # nothing is left off
        assert before.get(name, defaults[name]) == defaults[name], name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_are_elsewhere_on_the_last_rungs_of_models_with_layers_enough(device: str) -> None:
    def names(**about: Any) -> list[str]:
        return [rung.name for rung in LadderPlan(device, SIZES, **about).rungs()]

    assert names()[-2:] == ["less-memory", "kv-tiers"]
    assert names(away=1000)[-2:] == ["kv-tiers", "offload"]
    plan = LadderPlan(device, SIZES, away=1000, mixture=True)
    assert names(away=1000, mixture=True)[-3:] == ["kv-tiers", "offload", "expert-cache"]
    scarce, tiers, streamed, cached = (plan.settings(rung.name) for rung in plan.rungs()[-4:])
    assert scarce["kv_cache_memory"] == tiers["kv_cache_memory"] < streamed["kv_cache_memory"] == SIZES.kv_bytes
    assert "kv_host_memory" not in scarce and "kv_host_memory" not in streamed and tiers["kv_host_memory"]
    assert (streamed["weights_offload"], streamed["expert_cache"]) == (1000, "off") and "expert_cache" not in cached


def test_answers_stay_equal_where_memory_is_elsewhere(tmp_path: Path) -> None:
    mixture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    model = write_tiny(
        tmp_path / "tiny", **mixture, num_experts_per_tok=2, num_hidden_layers=6, max_position_embeddings=1024
    )
    rungs = "prefix-cache,less-memory,kv-tiers,offload,expert-cache"
    cache = tmp_path / "cache"
    made = library().path.parent  # or else it would be compiled once more
    shutil.copytree(made, native_dir(cache) / made.name)
    words = ["--rungs", rungs, "--cache-dir", str(cache), "--json", str(tmp_path / "l.json")]
    text, code = ladder(model, *TINY, *words)
    assert code == 0, text
    found = {rung["name"]: rung for rung in json.loads((tmp_path / "l.json").read_text())["rungs"]}
    assert list(found) == rungs.split(",") and not any(rung["error"] for rung in found.values())
    for name, rung in list(found.items())[1:]:
        exact = rung["exactness"]
        assert exact["different"] == exact["unjudged"] == 0 and exact["equal"] + exact["near"] == 8, name
    told = {name: "\n".join(rung["report"]) for name, rung in found.items()}
    assert "streaming  " in told["offload"] and "experts  " in told["expert-cache"]
    assert "kv_host_memory" in told["kv-tiers"] or "host" in told["kv-tiers"]


def test_every_op_but_the_experts_is_torchs_at_the_bottom() -> None:
    """An op that is not named would be the fastest there is; of some there is but one, of moe none that is native."""
    there_are = Counter(one.op for one in implementations("cpu"))
    assert TORCH_OPS.keys() == {op for op, count in there_are.items() if count > 1} - {"moe"}
    assert "native" not in TORCH_OPS.values()


def test_a_rung_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match="'pagin'; did you mean 'paging'"):
        LadderPlan("cpu", SIZES).chosen("bottom,pagin")
    assert [rung.name for rung in LadderPlan("cpu", SIZES).chosen("paging,bottom")] == ["bottom", "paging"]


def test_reserved_requests_are_a_quarter_of_those_that_fit() -> None:
    work = requests(32, 96, 32, seed=0)
    sizes = fitted(work, "cpu", kv_bytes_per_token=1000, longest=8192)
    tokens = sizes.kv_bytes // 1000
    assert 8 * sizes.max_len < tokens < 9 * sizes.max_len
    assert tokens > sum(work.prompts) + sum(work.outputs)
    assert len(set(work.prompts)) > 8 and len(set(work.outputs)) > 8
    assert 80 < sum(work.prompts) / 32 < 112 and 24 < sum(work.outputs) / 32 < 40
    with pytest.raises(ConfigError, match="the model was made for 100"):
        fitted(work, "cpu", 1000, longest=100)


def test_the_whole_ladder_on_a_tiny_model(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny", max_position_embeddings=1024)
    files = ["--html", str(tmp_path / "l.html"), "--plot", str(tmp_path / "plots"), "--json", str(tmp_path / "l.json")]
    rungs = "bottom,kv-cache,static,continuous,paging,prefix-cache"
    text, code = ladder(model, *TINY, "--rungs", rungs, *files)
    assert code == 0, text
    found = {rung["name"]: rung for rung in json.loads((tmp_path / "l.json").read_text())["rungs"]}
    assert list(found) == rungs.split(",")
    assert not any(rung["error"] for rung in found.values())
    for name, rung in found.items():
        exact = rung["exactness"]
        assert exact["different"] == 0 and exact["equal"] + exact["near"] == (0 if name == "bottom" else 8)
        assert 0 < rung["ttft"]["mean"] < rung["e2e"]["mean"] <= rung["seconds"]
        assert rung["memory"]["peak"] > 1e7
    assert found["bottom"]["recomputed"] > found["static"]["recomputed"] > found["continuous"]["recomputed"] == 0
    assert found["bottom"]["steps"] == found["kv-cache"]["steps"] > found["static"]["steps"] > found["paging"]["steps"]
    assert found["continuous"]["kv"]["waste"] > 0.7 > 0.5 > found["paging"]["kv"]["waste"]
    assert found["continuous"]["kv"]["blocks"] > found["paging"]["kv"]["blocks"] > found["bottom"]["kv"]["blocks"]
    html = (tmp_path / "l.html").read_text()
    assert "<script" not in html and not re.search(r'(src|href)="', html) and "6. prefix cache" in html
    ET.parse(tmp_path / "plots" / "ladder_cpu.svg")


def test_too_little_time_begins_fewer_requests_and_says_so(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny", max_position_embeddings=4096)
    rungs = "bottom,static,continuous"
    words = ["--output", "60", "--rungs", rungs, "--seconds", "0.1", "--json", str(tmp_path / "l.json")]
    text, code = ladder(model, *TINY, *words)
    assert code == 0, text
    found = {rung["name"]: rung for rung in json.loads((tmp_path / "l.json").read_text())["rungs"]}
    assert "| ~" in text and f"no KV cache, one at a time: {found['bottom']['ran']} of 8" in text
    for rung in found.values():
        assert 0 < rung["ran"] < rung["asked"] == 8 and rung["seconds"] > 0.1
        assert f" {rung['ran']}/8 |" in text
    assert found["static"]["ran"] % 2 == 0  # whole batches of as many as memory is reserved for; the others never began
    # What was begun was ended, and the answers are those of the rung below.
    assert found["static"]["exactness"]["equal"] + found["static"]["exactness"]["near"] == found["bottom"]["ran"]


def test_one_worker_serves_all_rungs_until_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[RungWorker] = []
    start = RungWorker.__init__
    monkeypatch.setattr(RungWorker, "__init__", lambda self: (started.append(self), start(self))[1])
    model = write_tiny(tmp_path / "tiny", max_position_embeddings=1024)
    plan = LadderPlan("cpu", SIZES, options={"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True})
    asks: list[Any] = [[[5, 6, 7], 4], [[8, 9], 4]]
    question = {"asks": asks, "warm": asks, "limit": 9.0, "single": False, "repeats": 1}
    with workers(shared=True) as asked:
        found = [asked(model, plan.settings(name), question, name, lambda *_: None) for name in ("static", "paging")]
        assert len(started) == 1
        with pytest.raises(WorkerFailed, match="ConfigError"):
            asked(model, plan.settings("paging") | {"max_num_seqs": -1}, question, "", lambda *_: None)
        found.append(asked(model, plan.settings("paging"), question, "", lambda *_: None))
        assert len(started) == 2
    assert len({json.dumps([one["tokens"] for one in run["answers"]]) for run in found}) == 1
    assert all(worker._process.poll() is not None for worker in started)


class Answers:
    """Stands in for worker processes."""

    def __init__(self, tokens: dict[str, list[list[int]]], gaps: list[float]) -> None:
        self.tokens, self.gaps = tokens, gaps
        self.judged: list[Any] = []
        self.turn = iter(tokens.values())

    def __call__(self, model: str, options: Any, question: dict[str, Any], title: str, report: Any) -> dict[str, Any]:
        if "judge" in question:
            self.judged = question["judge"]
            assert question["limit"] == 1
            return {"gaps": self.gaps}
        answers = next(self.turn)
        if not answers:
            raise WorkerFailed("no kernel")
        return {
            "seconds": 2.0, "steps": 1, "recomputed": 0, "report": [],
            "kv": {"blocks": 1, "bytes": 1.0, "waste": 0.5}, "memory": {"peak": 1, "device": 0},
            "answers": [
                {"index": index, "prompt": [index], "tokens": tokens, "gaps": [0.1], "ttft": ttft, "e2e": 1.0 + index}
                for index, (tokens, ttft) in enumerate(zip(answers, (0.5, 1.0, 2.5)))
            ],
        }  # fmt: skip


def stand_in(monkeypatch: pytest.MonkeyPatch, worker: Answers) -> None:
    monkeypatch.setattr(ladder_run, "workers", lambda shared: nullcontext(worker))


def test_differences_are_judged_where_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    same, other, third = [1, 2, 3, 4], [1, 2, 9, 4], [7, 2, 3, 4]
    tokens = {"bottom": [same, same], "kv-cache": [same, other, same], "static": [third, same, other], "fused-ops": []}
    worker = Answers(tokens, gaps=[0.0005, 0.2, 0.02])
    stand_in(monkeypatch, worker)
    plan = LadderPlan("cpu", SIZES)
    rungs = [rung for rung in plan.rungs() if rung.name in tokens]
    asks: list[Any] = [([index], 4) for index in range(4)]
    kept: list[list[str | None]] = []
    rows = climb(
        "m", plan, rungs, asks, [], limit=1, repeats=1, dtype="float32", report=lambda *_: None,
        keep=lambda rows: kept.append([row.error for row in rows]),
    )  # fmt: skip
    assert kept == [[None], [None, None], [None, None, None], [None, None, None, "no kernel"]]
    # the third request is first answered by the second rung: that one is the measure
    assert worker.judged == [([1, 1, 2], 3, 9), ([0], 1, 7), ([2, 1, 2], 3, 9)]
    assert rows[1].exactness == Exactness(equal=1, near=1, worst=0.0005, first=2)
    assert rows[2].exactness == Exactness(equal=1, different=2, worst=0.2, first=0)
    assert [at for _, _, at in first_differences(rows)] == [None, 2, 0, None, 2]
    assert (rows[0].ran, rows[0].asked) == (2, 4) and rows[0].tokens_per_second == 4 and rows[0].seconds == 2
    # four requests of a second each; the two that ran had their first token 0.5 s and 0 s after their turn came
    assert rows[0].e2e["mean"] == (1 + 2 + 3 + 4) / 4 and rows[0].ttft["mean"] == (0 + 1 + 2 + 3) / 4 + 0.25
    assert rows[3].error == "no kernel"
    assert any("native fused ops: not measured: no kernel" in line for line in lines(rows))


def test_what_the_judge_had_no_time_for_is_neither_near_nor_different(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"bottom": [[1, 2], [1, 2]], "kv-cache": [[1, 3], [4, 2]]}
    stand_in(monkeypatch, Answers(tokens, gaps=[0.0005]))
    plan = LadderPlan("cpu", SIZES)
    rungs = [rung for rung in plan.rungs() if rung.name in tokens]
    asks: list[Any] = [([0], 2), ([1], 2)]
    rows = climb("m", plan, rungs, asks, [], limit=1, repeats=1, dtype="float32", report=lambda *_: None)
    assert rows[1].exactness == Exactness(near=1, unjudged=1, worst=0.0005, first=0)
    assert rows[1].exactness.text == "1 near, 1 unjudged"


@pytest.mark.parametrize(("name", "longest"), [("static", 25), ("recorded", 99), ("kv-cache", 4)])
def test_a_gpu_warms_up_with_all_sizes_but_not_all_tokens(name: str, longest: int) -> None:
    plan = LadderPlan("cuda", SIZES)
    warm: list[Any] = [([1], 99)] * 64
    found = ladder_run._warm_up("cuda", plan.settings(name), warm, single=name == "kv-cache")
    assert max(tokens for _, tokens in found) == longest
    assert len(found) == (1 if name == "kv-cache" else 64)


def test_an_answer_that_ends_too_early_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"bottom": [[1, 2, 3]], "kv-cache": [[1, 2]], "static": [[1, 2, 3]]}
    stand_in(monkeypatch, Answers(tokens, gaps=[]))
    plan = LadderPlan("cpu", SIZES)
    rungs = [rung for rung in plan.rungs() if rung.name in tokens]
    rows = climb("m", plan, rungs, [([0], 3)], [], limit=1, repeats=1, dtype="float32", report=lambda *_: None)
    assert rows[1].exactness == Exactness(different=1, first=2) and rows[2].exactness == Exactness(equal=1)


def test_rounding_on_purpose_is_judged_more_mildly_from_there_on() -> None:
    plan = LadderPlan("cpu", SIZES)
    names = [rung.name for rung in plan.rungs() if plan.rounds(rung.name)]
    assert names == ["quantized", "recorded", "kv-quantized", "speculation", "less-memory", "kv-tiers"]
    assert next(rung for rung in plan.rungs() if rung.claim == BOUNDED).name == names[0]


def made(speeds: list[float | None]) -> list[RungResult]:
    rows = []
    for number, speed in enumerate(speeds):
        row = RungResult(Rung(f"r{number}", f"rung <{number}>", {}, "told"))
        if speed is None:
            row.error = "broken"
        else:
            latencies: dict[str, float | None] = {"mean": 1.0, "p99": 2.0}
            row = replace(
                row, tokens_per_second=speed, ttft=latencies, itl=latencies, e2e=latencies,
                kv={"bytes": 2e6, "waste": 0.25}, memory={"peak": 3_000_000, "device": 0},
            )  # fmt: skip
        rows.append(row)
    return rows


def test_factors_are_against_the_last_rung_that_ran() -> None:
    rows = made([2.0, 10.0, None, 5.0])
    table = dict(cells(rows))
    assert table["2. rung <1>"][:3] == ["10.0", "x5.00", "x5.00"]
    assert set(table["3. rung <2>"]) == {"-"}
    assert table["4. rung <3>"][:3] == ["5.00", "x0.50", "x2.50"]
    assert table["1. rung <0>"][5:11] == ["2,000", "1.00", "2.00", "2.00", "25%", "3.00"]


def test_the_waterfall_has_a_bar_from_rung_to_rung() -> None:
    root = ET.fromstring(waterfall("A & B", made([2.0, 20.0, None, 10.0])))
    bars = [one.attrib for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) == 3
    gain, loss = bars[1], bars[2]
    assert gain["fill"] != loss["fill"]
    assert float(gain["x"]) + float(gain["width"]) == pytest.approx(float(loss["x"]) + float(loss["width"]), abs=0.2)
    decade = float(gain["width"])
    assert float(loss["width"]) / decade == pytest.approx(0.301, abs=0.01)  # half, on a logarithmic axis


def test_the_page_escapes_what_it_is_told() -> None:
    text = page("A & B", ["<b>"], made([1.0]), [{"ops": "<i>"}])
    assert "A &amp; B" in text and "&lt;b&gt;" in text and "rung &lt;0&gt;" in text and "<i>" not in text
