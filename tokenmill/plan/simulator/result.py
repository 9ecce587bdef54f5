"""SimulationResult: what a simulated (or measured) run was like for its users and what it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engine.scheduler.policy import ShortestFirst
from tokenmill.engine.scheduler.predict import HIGH, MEDIAN
from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.demand.workload import percentile

if TYPE_CHECKING:
    from tokenmill.plan.simulator.replica import Replica, SimulatedJob

# Gaps between tokens are counted in classes 2 % wide, from 10 microseconds to 1000 seconds.
_EDGES = np.exp(np.arange(math.log(1e-5), math.log(1e3), 0.02))

Gaps = np.ndarray[tuple[int], np.dtype[np.float32]]  # four bytes per token are kept of a request


@dataclass(frozen=True, slots=True)
class ServedRequest:
    arrival: float
    prompt: int
    output: int
    cached: int
    ttft: float
    latency: float
    gaps: Gaps = field(compare=False, repr=False)  # seconds between its tokens

    def within(self, slo: Slo) -> bool:
        """Whether it got what was promised, as `bench serve` counts: the first token, and that share of the gaps."""
        return self.ttft <= slo.ttft and int((self.gaps <= slo.itl).sum()) >= slo.share * len(self.gaps)


@dataclass
class SimulationResult:
    gpus_per_replica: int = 1
    served: list[ServedRequest] = field(default_factory=list)
    seconds: float = 0.0
    replica_seconds: float = 0.0  # that replicas were there
    busy_seconds: float = 0.0  # that they worked
    refused: int = 0  # longer than a replica's memory
    preemptions: int = 0
    failures: int = 0
    moved: int = 0  # requests that went on elsewhere
    transferred: int = 0  # bytes of keys and values between pools
    steps: int = 0
    scale: list[tuple[float, int]] = field(default_factory=list)  # replicas that took work, over time
    coverage: dict[float, float] = field(default_factory=dict)  # of predicted lengths, where a policy predicts
    _gaps: Any = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, dtype=np.int64), repr=False)

    def add(self, job: SimulatedJob) -> None:
        """A job is done: keep its figures, not its tokens."""
        times = np.array(job.times)
        gaps = np.diff(times)
        np.add.at(self._gaps, np.searchsorted(_EDGES, gaps), 1)
        self.preemptions += job.preemptions
        self.served.append(
            ServedRequest(
                job.arrival,
                job.prompt,
                job.output,
                job.cached,
                float(times[0]) - job.arrival,
                float(times[-1]) - job.arrival,
                gaps.astype(np.float32),
            )
        )
        job.tokens, job.times = [], []

    def close(self, now: float, replicas: Sequence[Replica]) -> None:
        self.seconds = now
        self.busy_seconds = sum(one.busy for one in replicas)
        self.steps = sum(one.steps for one in replicas)
        policies = [policy for one in replicas for policy in one.policies]
        predictors = [one.predictor for one in policies if isinstance(one, ShortestFirst)]
        learned = sum(one.learned for one in predictors)
        for level in (MEDIAN, HIGH) if learned else ():
            self.coverage[level] = sum(one.coverage(level) * one.learned for one in predictors if one.learned) / learned

    def gap(self, share: float) -> float:
        """A percentile over all gaps between tokens of all requests, within 2 %."""
        total = int(self._gaps.sum())
        if not total:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self._gaps), math.ceil(share * total)))
        return float(_EDGES[min(place, len(_EDGES) - 1)])

    def goodput(self, slo: Slo) -> float:
        return self._good(slo) / self.seconds if self.seconds else 0.0

    def _good(self, slo: Slo) -> int:
        return sum(one.within(slo) for one in self.served)

    def figures(self, slo: Slo) -> dict[str, float]:
        """Everything that tables and files show, in seconds and tokens."""
        served = self.served
        if not served:
            return {"requests": 0.0, "refused": float(self.refused)}
        ttfts, latencies = [one.ttft for one in served], [one.latency for one in served]
        prompts = sum(one.prompt for one in served)
        return {
            "requests": float(len(served)),
            "refused": float(self.refused),
            "seconds": self.seconds,
            "requests_per_second": len(served) / self.seconds,
            "output_tokens_per_second": sum(one.output for one in served) / self.seconds,
            "goodput": self.goodput(slo),
            "good_share": self._good(slo) / (len(served) + self.refused),
            "ttft_mean": sum(ttfts) / len(ttfts),
            "ttft_p50": percentile(ttfts, 0.5),
            "ttft_p95": percentile(ttfts, 0.95),
            "ttft_p99": percentile(ttfts, 0.99),
            "latency_mean": sum(latencies) / len(latencies),
            "latency_p50": percentile(latencies, 0.5),
            "latency_p99": percentile(latencies, 0.99),
            "itl_p50": self.gap(0.5),
            "itl_p95": self.gap(0.95),
            "itl_p99": self.gap(0.99),
            "cached_share": sum(one.cached for one in served) / prompts,
            "busy_share": self.busy_seconds / self.replica_seconds if self.replica_seconds else 0.0,
            "gpu_seconds": self.replica_seconds * self.gpus_per_replica,
            "preemptions": float(self.preemptions),
            "failures": float(self.failures),
            "moved": float(self.moved),
            "transferred_bytes": float(self.transferred),
            "steps": float(self.steps),
            **{f"coverage_{level}": share for level, share in self.coverage.items()},
        }
