"""How much of the host's memory is worth giving to KV: what a load that comes back to its texts finds there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.plan.planner.queueing import demand_of, most_rate
from tokenmill.plan.solve.roofline import facts_for

if TYPE_CHECKING:
    from tokenmill.plan.planner.search import Choice, PlanRequest

LEAST_GAIN = 0.02  # of prompt tokens: below, nothing is proposed
ALMOST_ALL = 0.9  # of what memory without end would find
MOST_TIMES = 32  # the device's cache
PROBE = 1024  # tokens that are read at once, or computed


@dataclass(frozen=True)
class HostTier:
    """`kv_host_memory` of every copy, and what it brings."""

    nbytes: int
    tokens: int
    cached_share: float  # of prompt tokens that are found, on the device or there
    rate: float  # requests per second within the promises, of all copies; copies of keys and values not counted
    faster: float  # reading a token's keys and values against computing them: as often as fast


def host_tier(ask: PlanRequest, choice: Choice) -> HostTier | None:
    """The least memory, in doublings of the device's own, that finds almost all that can be found; None: it gains too
    little, or what lies there comes no faster than it is computed, or it is not known how fast it comes.
    """
    link, placement = ask.fleet.host_bytes_per_s, choice.placement
    if link is None or ask.load.hash_ids is None or choice.prefill_copies or not placement.room.kv_tokens:
        return None
    each = (
        placement.memory.kv * placement.layout.split.gpus / placement.room.kv_tokens
    )  # bytes of a token, of all ranks
    model = placement.step_time
    computed = model.seconds(facts_for(model.shape, (), [(0, PROBE, 1)])) / PROBE
    read = each / placement.layout.split.gpus / link  # every rank has a link of its own
    there, most = choice.cached_share, ask.load.cached_share()
    if most - there < LEAST_GAIN or read >= computed:
        return None
    share, times = there, 1
    while share - there < ALMOST_ALL * (most - there) and times < MOST_TIMES:
        times *= 2
        # What is on the device is kept there, too: the host's memory alone says what is found.
        share = max(share, ask.load.cached_share(times * placement.room.kv_tokens))
    if share - there < LEAST_GAIN:
        return None
    demand = demand_of(ask.load, ask.slo.share, share)
    rate = choice.copies * most_rate(model, demand, placement.room, ask.slo)
    tokens = times * placement.room.kv_tokens
    return HostTier(int(tokens * each), tokens, share, rate, computed / read)
