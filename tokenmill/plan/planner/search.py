"""The planner: which settings serve a workload within its promises on the fewest GPUs, and what the others lack."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from tokenmill.errors import ConfigError
from tokenmill.plan.demand.slo import NO_PROMISE, Slo
from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.planner.candidates import Fleet, Placement, ReplicaLayout, placements
from tokenmill.plan.planner.precision import allowed_loss
from tokenmill.plan.planner.queueing import Capacity, Demand, Estimate, demand_of, estimate, most_rate
from tokenmill.plan.planner.tiers import HostTier, host_tier
from tokenmill.plan.solve.drafts import Drafts
from tokenmill.plan.solve.shape import ModelShape

TRICKLE = 1e-3  # requests per second: as good as one at a time
LEAST_ROWS = 64
SPLIT_TRIES = 6  # layouts for which separate prefill and decode is tried
RESERVE = 1.15  # of the needed rate: step times are known to 15 %
BETTER = 1.05  # a difference below this is none: the model is not that exact


@dataclass(frozen=True)
class PlanRequest:
    """The question: a model, machines, a workload, promises."""

    shape: ModelShape
    fleet: Fleet
    work: Workload
    slo: Slo = NO_PROMISE
    quality: str = "near"
    price: float | None = None  # per GPU and hour
    max_len: int | None = None  # None: the longest request of the workload
    drafts: Drafts | None = None

    @property
    def wanted(self) -> float:
        """Requests per second that a plan has to carry; infinite where all the work is there at once."""
        return self.load.busy[0] * RESERVE

    @property
    def limit(self) -> int:
        """Tokens that no request may exceed: the model's own limit, or the one that was asked for."""
        return min(self.max_len or self.shape.max_positions, self.shape.max_positions)

    @cached_property
    def load(self) -> Workload:
        """The requests that can be served at all. Raises ConfigError where there are none."""
        found = self.work.up_to(self.limit)
        if found is None:
            shortest = min(prompt + output for prompt, output in zip(self.work.prompts, self.work.outputs))
            asked = self.limit < self.shape.max_positions
            raise ConfigError(
                f"no request fits: the shortest of the workload has {shortest:,} tokens with its answer, and "
                + (f"max_model_len is {self.limit:,}" if asked else f"{self.shape.name} takes {self.limit:,}")
                + "; plan for shorter requests, or "
                + ("raise max_model_len" if asked else "for a model with more positions")
            )
        return found

    @property
    def left_out(self) -> int:
        """Requests of the workload that are too long to be served."""
        return len(self.work) - len(self.load)

    @property
    def longest(self) -> int:
        if self.max_len is not None:
            return self.limit
        return max(prompt + output for prompt, output in zip(self.load.prompts, self.load.outputs))


@dataclass(frozen=True)
class Choice:
    """One way to do it, with what is expected of it."""

    placement: Placement
    copies: int
    rate: float  # the highest rate within the promises, of all copies together
    estimate: Estimate  # at the workload's rate, or at the highest where that is lower
    cached_share: float
    prefill_copies: int = 0  # above 0: these copies read prompts, the others decode

    @property
    def layout(self) -> ReplicaLayout:
        return self.placement.layout

    @property
    def gpus(self) -> int:
        return self.copies * self.layout.split.gpus

    @property
    def name(self) -> str:
        split = f", {self.prefill_copies} of them for prompts" if self.prefill_copies else ""
        return f"{self.copies} x ({self.layout.name}){split}"


@dataclass(frozen=True)
class Plan:
    ask: PlanRequest
    demand: Demand
    best: Choice
    others: tuple[Choice, ...]  # the best of every other kind, best first
    refused: tuple[tuple[ReplicaLayout, str], ...]  # what does not fit
    host: HostTier | None = None  # of the best, where it gains enough

    @property
    def enough(self) -> bool:
        return self.best.rate > 0 and self.best.rate >= self.needed * RESERVE

    @property
    def needed(self) -> float:
        """Requests per second; 0 where the work is all there at once and only speed counts."""
        return 0.0 if math.isinf(self.demand.rate) else self.demand.rate


class _Demands:
    """What is asked of a copy whose cache holds so much; one per power of two, since counting hits takes long."""

    def __init__(self, ask: PlanRequest) -> None:
        self._ask = ask
        self._known: dict[int, tuple[float, Demand]] = {}

    def of(self, placement: Placement) -> tuple[float, Demand]:
        """The share of prompt tokens that is cached, and what is left. Running requests take half of the cache."""
        size = max(placement.room.kv_tokens // 2, 1).bit_length() if self._ask.load.hash_ids is not None else 0
        if size not in self._known:
            share = self._ask.load.cached_share(2**size)
            demand = demand_of(self._ask.load, self._ask.slo.share, share)
            self._known[size] = share, replace(demand, drafts=self._ask.drafts)
        return self._known[size]


def plan(ask: PlanRequest) -> Plan:
    """Try everything that fits. Raises ConfigError where nothing does."""
    demands = _Demands(ask)
    choices: list[Choice] = []
    refused: list[tuple[ReplicaLayout, str]] = []
    enough = ask.fleet.gpus  # GPUs of the smallest that is known to carry the load
    for layout in ask.fleet.layouts(ask.shape, allowed_loss(ask.quality)):
        if layout.split.gpus > 2 * enough:  # it could only cost more
            continue
        sizes, reason = placements(ask.fleet, ask.shape, layout, ask.longest)
        if sizes:
            choices.append(
                min((_judge(ask, placement, demands) for placement in sizes), key=lambda one: _merit(ask, one))
            )
            if choices[-1].rate >= ask.wanted:
                enough = min(enough, choices[-1].gpus)
        else:
            refused.append((layout, reason))
    if not choices and (streaming := ask.fleet.streaming()) is not None:
        return plan(replace(ask, fleet=streaming))
    if not choices:
        raise ConfigError(f"{ask.shape.name} fits in no way into {ask.fleet.name}: {refused[-1][1]}")
    choices.sort(key=lambda one: _merit(ask, one))
    divided = [one for choice in choices[:SPLIT_TRIES] if (one := _divide(ask, choice, demands)) is not None]
    choices = sorted([*choices, *divided], key=lambda one: _merit(ask, one))
    best = _trim(ask, choices[0])
    demand = demands.of(choices[0].placement)[1]
    return Plan(ask, demand, best, tuple(choices[1:]), tuple(refused), host_tier(ask, best))


def _judge(ask: PlanRequest, placement: Placement, demands: _Demands) -> Choice:
    cached_share, demand = demands.of(placement)
    each = most_rate(placement.step_time, demand, placement.room, ask.slo)
    copies = _copies(ask.wanted, each, ask.fleet.gpus // placement.layout.split.gpus)
    at = demand.at(min(demand.rate / copies, each) or TRICKLE)
    return Choice(
        placement, copies, each * copies, estimate(placement.step_time, at, placement.room, ask.slo.share), cached_share
    )


def _copies(rate: float, each: float, most: int) -> int:
    """As few as carry the rate; all there are where they cannot, or where everything is there at once."""
    if math.isinf(rate) or each * most < rate:
        return most
    return max(1, math.ceil(rate / each))


def _divide(ask: PlanRequest, choice: Choice, demands: _Demands) -> Choice | None:
    """Some copies read prompts, the others decode: the division that carries the most."""
    most = ask.fleet.gpus // choice.layout.split.gpus
    if most < 2 or math.isinf(ask.load.rate):
        return None
    placement, share = choice.placement, ask.slo.share
    demand = demands.of(placement)[1]
    # Keys and values travel once per request, behind the first token.
    moved = demand.prompt * ask.shape.kv_elements * placement.step_time.element_bytes.kv / ask.fleet.link.bytes_per_s
    # Nobody decodes where prompts are read, so a step may take as many tokens as it likes.
    read = most_rate(placement.step_time, demand, placement.room, replace(ask.slo, itl=math.inf), decode=False)
    write = most_rate(placement.step_time, demand, placement.room, replace(ask.slo, ttft=math.inf), prefill=False)
    if min(read, write) <= 0:
        return None
    best: Choice | None = None
    for copies in range(2, most + 1):
        first = min(max(1, round(copies * write / (read + write))), copies - 1)  # both sides run out together
        rate = min(first * read, (copies - first) * write)
        at = min(rate, demand.rate)
        one = estimate(placement.step_time, demand.at(at / first), placement.room, share, decode=False)
        two = estimate(placement.step_time, demand.at(at / (copies - first)), placement.room, share, prefill=False)
        seen = replace(two, ttft=one.ttft, ttft_high=one.ttft_high, itl=two.itl + moved / demand.output)
        made = Choice(placement, copies, rate, seen, choice.cached_share, prefill_copies=first)
        if best is None or _merit(ask, made) < _merit(ask, best):
            best = made
    return best


def _merit(ask: PlanRequest, choice: Choice) -> tuple[float, ...]:
    """Smaller is better: keeps the promises; fewest GPUs; least loss; simplest; most headroom."""
    needed, slo, seen = ask.wanted, ask.slo, choice.estimate
    split = choice.layout.split
    rounded = choice.layout.weights.loss + choice.layout.kv.loss
    plain = (rounded, choice.prefill_copies > 0, split.gpus, split.pipeline, split.expert)
    if choice.rate <= 0:  # even a lone request waits too long: the least too long is best
        return (2, max(seen.ttft_high / slo.ttft, seen.itl_high / slo.itl), choice.gpus, *plain)
    headroom = -round(math.log(choice.rate, BETTER))
    if math.isinf(needed) or choice.rate < needed:  # the more it carries the better
        return (1, headroom, choice.gpus, *plain)
    return (0, choice.gpus, *plain, headroom, seen.itl_high)


def _trim(ask: PlanRequest, choice: Choice) -> Choice:
    """No more rows than the load has use for: each takes memory that could hold keys and values."""
    if math.isinf(ask.load.rate) or not math.isfinite(choice.estimate.rows_high):
        return choice
    rows = choice.estimate.rows_high * (1 + choice.estimate.drafts)  # a draft is verified where a row would be
    wanted = max(LEAST_ROWS, 1 << math.ceil(math.log2(max(1.0, 1.5 * rows))))
    room = choice.placement.room
    if wanted >= room.max_rows:
        return choice
    placement = ask.fleet.place(
        ask.shape, choice.layout, longest=ask.longest, rows=wanted, step_tokens=room.step_tokens
    )
    return replace(
        choice, placement=replace(placement, room=Capacity(wanted, room.step_tokens, placement.room.kv_tokens))
    )
