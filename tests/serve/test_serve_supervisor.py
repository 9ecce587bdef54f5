"""Engine processes start, refuse to start, idle, and end with whoever started them."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sim_service import COMMAND, answer, eventually, greedy, make, opened, run, solo, strike

from tokenmill.errors import ConfigError, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.serve.engine.in_flight import InFlightFile
from tokenmill.serve.engine.main import EngineArgs
from tokenmill.serve.engine_client.admission import Unavailable
from tokenmill.serve.engine_client.supervisor import StartFailed
from tokenmill.serve.settings import ServeSettings


def test_a_refused_setting_comes_out_as_the_sentence_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        service = make({"refuse": "block_size is 7; it must be a power of two"})
        with pytest.raises(ConfigError, match="block_size is 7; it must be a power of two"):
            await service.start()
        assert not service.ready()
        await service.stop()

    run(main())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ((sys.executable, "-c", "import sys; sys.exit('no such device')"), r"status 1 \(no such device\)"),
        ((sys.executable, "-c", "import os; os.abort()"), "died of SIGABRT"),
    ],
)
def test_an_engine_that_dies_before_it_is_ready_tells_why(command: tuple[str, ...], cause: str) -> None:
    async def main() -> None:
        service = make(command=command)
        with pytest.raises(StartFailed, match=cause):
            await service.start()
        await service.stop()

    run(main())


def test_an_engine_that_is_silent_while_loading_is_given_up() -> None:
    async def main() -> None:
        service = make(command=(sys.executable, "-c", "import time; time.sleep(60)"), start_seconds=0.3)
        with pytest.raises(StartFailed, match=r"said nothing while loading for 0\.3 s"):
            await service.start()
        await service.stop()

    run(main())


def test_progress_of_loading_is_passed_on_and_a_request_before_it_is_told_to_wait() -> None:
    async def main() -> None:
        seen: list[str] = []
        service = make()
        with pytest.raises(Unavailable, match=r"starting \(starting the engine\)"):
            await service.submit([5], greedy())
        assert service.live() and not service.ready() and service.stats().state == "starting"
        await service.start(lambda done, total, what: seen.append(what))
        assert seen == ["loading weights"] and service.ready()
        await service.stop()

    run(main())


def test_the_folder_is_private_and_goes_with_the_service() -> None:
    async def main() -> None:
        async with opened() as service:
            folder = Path(service._supervisor._folder.name)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            await strike(service, signal.SIGKILL)
            await eventually(lambda: service._supervisor.generation == 2 and service._supervisor.pid)
            assert sorted(path.name for path in folder.iterdir()) == ["2", "in-flight-2"]
        assert not folder.exists()

    run(main())


def test_stop_ends_the_process_and_every_stream_and_may_be_repeated() -> None:
    async def main() -> None:
        service = make({"step": 0.01})
        await service.start()
        pid = service._supervisor.pid
        job = asyncio.create_task(answer(service, [5], greedy(2000)))
        await eventually(lambda: service._counters.engine.running)
        await service.stop()
        output = await job
        assert output.outputs[0].finish_reason == "error" and "stopped" in output.error
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        await service.stop()
        with pytest.raises(Unavailable):
            await service.submit([5], greedy())

    run(main())


def test_idle_burns_no_cpu() -> None:
    async def main() -> None:
        async with opened() as service:
            await answer(service, [5], greedy(5))
            await asyncio.sleep(0.2)
            engine = psutil.Process(service._supervisor.pid)
            ours, theirs = time.process_time(), sum(engine.cpu_times()[:2])
            await asyncio.sleep(1.5)
            assert time.process_time() - ours < 0.02
            assert sum(engine.cpu_times()[:2]) - theirs <= 0.02

    run(main())


ORPHAN = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from sim_service import make
async def main():
    service = make()
    await service.start()
    print(service._supervisor.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_an_engine_does_not_outlive_its_front(stopped: bool) -> None:
    """Not even one that cannot notice anything; there the kernel has to help."""
    if stopped and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    script = ORPHAN.format(folder=str(Path(__file__).parent))
    front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        engine = int(front.stdout.readline())
        assert psutil.pid_exists(engine)
        if stopped:
            os.kill(engine, signal.SIGSTOP)
        front.kill()
        front.wait()
        psutil.wait_procs([psutil.Process(engine)] if psutil.pid_exists(engine) else [], timeout=60)
        assert not psutil.pid_exists(engine)
    finally:
        front.kill()
        front.stdout.close()
        front.wait()


def test_an_engine_leaves_when_its_standard_input_closes(tmp_path: Path) -> None:
    """How it notices on systems where the kernel does not help."""
    InFlightFile.create(tmp_path / "flight")
    args = EngineArgs(f"ipc://{tmp_path}/socket", str(tmp_path / "flight"), 1.0, {"model": "{}"})
    engine = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    engine.stdin.write(args.line())
    engine.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        engine.wait(timeout=1.0)
    engine.stdin.close()
    assert engine.wait(timeout=60) == 1


def test_the_front_needs_no_torch() -> None:
    code = "import sys, tokenmill.serve.engine_client.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_core_needs_nothing_of_the_server() -> None:
    code = "import sys, tokenmill.llm; sys.exit(bool({'zmq', 'msgspec', 'tokenmill.serve'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_bad_requests_are_refused_and_harm_nobody() -> None:
    async def main() -> None:
        async with opened({"step": 0.003}) as service:
            good = asyncio.create_task(answer(service, [5, 6], greedy(60)))
            for prompt, params, why in [
                ([], greedy(), "empty"),
                ([5000], greedy(), "outside the vocabulary"),
                ([5] * 5000, greedy(), "prompt and answer together"),
                ([5], SamplingParams(beam_width=2), "beam search"),
                ("text", greedy(), "tokenizer"),
            ]:
                with pytest.raises(InvalidRequest, match=why):
                    await service.submit(prompt, params)
            await service.submit([7], greedy(500), request_id="mine")
            with pytest.raises(InvalidRequest, match="already running"):
                await service.submit([7], greedy(), request_id="mine")
            assert (await good).outputs[0].token_ids == solo([5, 6], greedy(60))
            assert service.stats().refused == 6

    run(main())


def test_a_wait_that_times_out_leaves_the_stream_whole() -> None:
    async def main() -> None:
        async with opened({"step": 0.05}) as service:
            stream = await service.submit([5], greedy(6))
            waits = 0
            while True:
                try:
                    output = await asyncio.wait_for(anext(stream), 0.01)
                except TimeoutError:
                    waits += 1
                    continue
                if output.finished:
                    break
            assert waits and output.outputs[0].token_ids == solo([5], greedy(6))

    run(main())


def test_degrade_routes_to_the_second_service_only_while_the_first_is_down() -> None:
    async def main() -> None:
        async with opened() as small, opened({"step": 0.003}) as large:
            large.degrade = small
            assert large.route() is large
            await strike(large, signal.SIGSTOP)
            os.kill(large._supervisor.pid, signal.SIGKILL)
            await eventually(lambda: large.stats().state == "restarting")
            assert large.route() is small
            await eventually(large.ready)
            assert large.route() is large

    run(main())


@pytest.mark.parametrize("setting", [{"hang_seconds": 0}, {"max_queued_tokens": 0}, {"backoff_seconds": -1}])
def test_settings_that_make_no_sense_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ServeSettings(**setting)
