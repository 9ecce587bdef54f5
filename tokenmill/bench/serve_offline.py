"""The offline API on the work that a server gets: what HTTP costs, measured in turns.

Run as a program, this file is the worker that holds the offline engine; it answers JSON lines (see peers/host.py).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.bench.figures import Run
from tokenmill.bench.peers.serve import answer_lines
from tokenmill.bench.serve import Load, Report, drive
from tokenmill.bench.serve_client import ServerAddress, run
from tokenmill.bench.serve_started import started_server
from tokenmill.bench.workloads import Mix
from tokenmill.errors import TokenmillError

PATIENCE = 1800.0  # seconds that one question to the worker may take


@dataclass
class Overhead:
    """Output tokens per second of both ways, a figure per round."""

    served: list[float]
    offline: list[float]
    results: list[Run]  # of the served rounds

    @property
    def percent(self) -> list[float]:
        """What HTTP costs, in percent of the offline throughput, per round."""
        return [100 * (1 - over / without) for over, without in zip(self.served, self.offline)]

    @property
    def median(self) -> float:
        return statistics.median(self.percent)

    @property
    def best(self) -> float:
        """Of the best rounds: on a machine that has other things to do, those are the ones it disturbed least."""
        return 100 * (1 - max(self.served) / max(self.offline))

    def figures(self) -> dict[str, Any]:
        return {
            "served_tokens_per_second": self.served,
            "offline_tokens_per_second": self.offline,
            "overhead_percent": self.percent,
            "median_overhead_percent": self.median,
            "best_overhead_percent": self.best,
        }

    def lines(self) -> Iterator[str]:
        yield f"{'':12}{'served':>10}{'offline':>10}{'overhead':>10}   output tokens/s"
        for number, (served, offline, percent) in enumerate(zip(self.served, self.offline, self.percent), 1):
            yield f"round {number:<6}{served:>10.1f}{offline:>10.1f}{percent:>8.1f} %"
        served, offline = statistics.median(self.served), statistics.median(self.offline)
        yield f"{'median':<12}{served:>10.1f}{offline:>10.1f}{self.median:>8.1f} %"
        yield f"{'best':<12}{max(self.served):>10.1f}{max(self.offline):>10.1f}{self.best:>8.1f} %"


def overhead(
    model: str, options: dict[str, Any], mix: Mix, load: Load, rounds: int, seed: int, tell: Report
) -> Overhead:
    """The same prompts through a server and through `LLM`, in turns. All of a round's prompts are new to both."""
    from tokenmill.bench.peers import OURS
    from tokenmill.bench.peers.host import PeerWorker, WorkerFailed, usable_cores

    found = Overhead([], [], [])
    threads = int(os.environ.get("OMP_NUM_THREADS") or usable_cores())
    worker = PeerWorker(sys.executable, "offline", threads, name=OURS, serve=Path(__file__))
    try:
        with started_server(model, options) as server:
            worker.ask("load", PATIENCE, model=model, options=options)

            def offline(load: Load) -> float:
                worker.thaw()
                prompts, lengths = [ask.prompt for ask in load.asks], [ask.max_tokens for ask in load.asks]
                asked = worker.ask("batch", PATIENCE, prompts=prompts, max_tokens=lengths)
                worker.freeze()
                return float(asked["tokens"] / asked["seconds"])

            def served(load: Load) -> Run:
                result = run(drive(ServerAddress(server.url), load))
                if result.errors:
                    raise TokenmillError(f"answers failed under load: {dict(result.errors)}")
                return result

            for number in range(-1, rounds):  # the first is for warming up and does not count
                this = replace(load, asks=mix.asks(seed + 1000 + number))
                for turn in (0, 1) if number % 2 else (1, 0):
                    if turn == 0 and (result := served(this)) and number >= 0:
                        found.results.append(result)
                        found.served.append(result.output_tokens / result.seconds)
                    elif turn == 1 and (speed := offline(this)) and number >= 0:
                        found.offline.append(speed)
                tell(number + 1, rounds, "rounds")
    except WorkerFailed as failure:
        raise TokenmillError(f"the offline engine failed: {failure}") from None
    finally:
        worker.close()
    return found


class Offline:
    def load(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        from tokenmill import LLM

        self._llm = LLM(model, **options)
        return {"lines": self._llm.plan_lines()}

    def batch(self, prompts: list[str], max_tokens: list[int]) -> dict[str, Any]:
        from tokenmill import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


if __name__ == "__main__":
    answer_lines(Offline())
