"""What HTTP costs against the offline API, as data and as lines for a person."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from tokenmill.bench.serve_offline import Overhead


def overhead_figures(found: Overhead) -> dict[str, Any]:
    return {
        "served_tokens_per_second": found.served,
        "offline_tokens_per_second": found.offline,
        "overhead_percent": found.percent,
        "median_overhead_percent": found.median,
        "best_overhead_percent": found.best,
    }


def overhead_lines(found: Overhead) -> Iterable[str]:
    yield f"{'':12}{'served':>10}{'offline':>10}{'overhead':>10}   output tokens/s"
    for number, (served, offline, percent) in enumerate(zip(found.served, found.offline, found.percent), 1):
        yield f"round {number:<6}{served:>10.1f}{offline:>10.1f}{percent:>8.1f} %"
    served, offline = statistics.median(found.served), statistics.median(found.offline)
    yield f"{'median':<12}{served:>10.1f}{offline:>10.1f}{found.median:>8.1f} %"
    yield f"{'best':<12}{max(found.served):>10.1f}{max(found.offline):>10.1f}{found.best:>8.1f} %"
