"""Where kernels cannot be compiled ahead, the engine starts all the same, and nothing of the attempt is left."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from killed_job import killed_job
from triton.errors import TritonError

from tokenmill.config import EngineConfig
from tokenmill.engine import build, kernels
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.errors import ModelError
from tokenmill.ops.triton import compiler
from tokenmill.ops.triton.compile_worker import Orders

HERE = Path(__file__).parent
TARGET = ("cuda", 90, 32)


def tell(done: int, total: int, what: str) -> None:
    """Nobody looks."""


def test_a_process_that_is_killed_while_it_compiles_is_not_waited_for(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "tokenmill.ops.triton.compile_worker"],
        input=pickle.dumps(Orders(TARGET, [("one", killed_job()), ("two", killed_job())], 2)),
        env=environment, capture_output=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 1 and b"a process that compiles kernels died" in ended.stderr


def test_orders_that_nobody_takes_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_target", lambda: TARGET)
    made = compiler.KernelCompiler(1 << 30)
    program = [sys.executable, "-c", ""]
    made._process = process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.wait()
    made._compile([("x" * 100_000, killed_job())], tell)
    made.close()
    assert process.stdin is not None and process.stdin.closed


def test_a_cache_of_tritons_that_cannot_be_written_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # in which there can be no folder, whoever asks
    monkeypatch.setattr(compiler.triton.knobs.cache, "dir", str(tmp_path / "file"))
    assert compiler.KernelCompiler(1 << 30).cache_is_new


def test_an_engine_whose_warm_up_fails_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> tuple[int, int]:
        raise TritonError("out of resource: shared memory")

    monkeypatch.setattr(kernels, "warm_up", fail)
    runner, ended = TorchRunner.__new__(TorchRunner), []
    runner.device = torch.device("cpu")
    monkeypatch.setattr(runner, "end_rehearsal", lambda: ended.append(True), raising=False)
    engine: Any = SimpleNamespace(runner=runner, scheduler=SimpleNamespace(finds_shared_prefixes=False))
    settings: Any = SimpleNamespace(max_rows=1, max_step_tokens=1)
    [line] = kernels.warm_up_kernels(compiler.KernelCompiler(1 << 30), engine, settings, tell)
    assert "because the warm-up failed: TritonError: out of resource: shared memory" in line
    assert ended == [True]  # what was tried has left nothing in the rows


def test_whoever_compiles_is_ended_where_there_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    waiting = SimpleNamespace(close=lambda: ended.append(True))
    monkeypatch.setattr(build, "start_compiler", lambda config, device: waiting)
    with pytest.raises(ModelError):
        build.build(EngineConfig(model=str(tmp_path / "none"), device="cpu"))
    assert ended == [True]
