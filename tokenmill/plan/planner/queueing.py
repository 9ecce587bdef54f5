"""What a load does to one copy of a model: steps in the steady state, waiting, and the times a client sees."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.demand.workload import Workload, percentile
from tokenmill.plan.solve.drafts import Drafts, verifying
from tokenmill.plan.solve.roofline import Roofline
from tokenmill.step_time import Facts

MAX_ROUNDS = 200
HALVINGS = 8  # of a factor of 4: to half a percent


@dataclass(frozen=True)
class Demand:
    """A workload as the estimate sees it. Prompts are what is left of them after the prefix cache."""

    rate: float  # requests per second, in a busy minute
    burstiness: float
    prompt: float  # new tokens, mean
    prompt_spread: float  # squared coefficient of variation
    prompt_high: float  # at the SLO's share
    depth: float  # keys before a chunk's own, mean: what was cached, and half of the prompt
    output: float  # mean
    context: float  # keys that a decoding row reads, averaged over its life
    longest: int  # prompt and output
    drafts: Drafts | None = None

    def at(self, rate: float) -> Demand:
        return replace(self, rate=rate)


def demand_of(work: Workload, share: float, cached_share: float = 0.0) -> Demand:
    rate, burstiness = work.busy
    count = len(work)
    new = [prompt * (1 - cached_share) for prompt in work.prompts]
    mean = sum(new) / count
    output = sum(work.outputs) / count
    # A row reads its prompt and what it has so far, once per token of its answer.
    read = sum(out * (prompt + out / 2) for prompt, out in zip(work.prompts, work.outputs))
    spread = sum((one - mean) ** 2 for one in new) / count / mean**2
    size_biased = mean * (1 + spread)  # the prompt that a random token of a prompt belongs to
    return Demand(
        rate=rate,
        burstiness=burstiness,
        prompt=mean,
        prompt_spread=spread,
        prompt_high=percentile(new, share),
        depth=size_biased * (0.5 + cached_share / (1 - cached_share)),
        output=output,
        context=read / (output * count),
        longest=max(prompt + out for prompt, out in zip(work.prompts, work.outputs)),
    )


@dataclass(frozen=True)
class Capacity:
    max_rows: int
    step_tokens: int
    kv_tokens: int


@dataclass(frozen=True)
class Estimate:
    """The steady state, and what is in the way where there is none."""

    itl: float  # seconds, mean
    itl_high: float  # at the SLO's share
    ttft: float  # mean
    ttft_high: float
    rows: float  # decoding at once, mean
    rows_high: float
    busy: float  # share of the time that prompts could be read which they are
    limit: str = ""  # why this rate cannot be kept up; empty: it can
    drafts: int = 0  # that a row verifies in a step that only decodes
    tokens_per_step: float = 1.0  # of a row, in such a step

    def meets(self, slo: Slo) -> bool:
        return not self.limit and self.ttft_high <= slo.ttft and self.itl_high <= slo.itl


def estimate(
    model: Roofline, demand: Demand, room: Capacity, share: float, *, prefill: bool = True, decode: bool = True
) -> Estimate:
    """Some steps only decode, others read prompts as well; how many rows there are follows from how long both take.

    Without `prefill` or `decode` this is one side of a split deployment. A pipeline's stages work on different rows:
    each of its steps has a share of the rows and takes all stages' time. Of drafts there are as many as make tokens
    come fastest.
    """
    plain = _estimate(model, demand, room, share, prefill, decode, 0)
    if demand.drafts is None or not decode or plain.limit:
        return plain
    rows = max(plain.rows / model.split.pipeline, 1.0)  # with drafts there are fewer, and then more are worth it
    count = demand.drafts.best(model, rows, rows * demand.context, room.max_rows / model.split.pipeline)
    drafted = _estimate(model, demand, room, share, prefill, decode, count)
    return plain if drafted.limit or drafted.rows_high * (1 + count) > room.max_rows else drafted


def _estimate(
    model: Roofline, demand: Demand, room: Capacity, share: float, prefill: bool, decode: bool, count: int
) -> Estimate:
    """With so many drafts per row. Beside prompts there are none."""
    stages, gained = model.split.pipeline, 1.0 + (demand.drafts.accepted(count) if demand.drafts is not None else 0.0)
    rows, output = 0.0, demand.output if decode else 0.0
    new_per_s = demand.rate * demand.prompt / stages if prefill else 0.0
    plain = reading = mean = per_token = chunk = often = 0.0
    for _ in range(MAX_ROUNDS):
        budget = room.step_tokens - rows / stages
        if budget <= 0 or rows > room.max_rows:
            return _over("rows")
        # Whatever the mean, a step that decodes has a row
        plain = _step(model, demand, max(rows / stages, 1.0) if decode else 0.0, 0.0, count)
        # Prompts that arrive during a step are read together; a single one may be shorter than what a step takes.
        chunk = min(budget, max(demand.prompt, new_per_s * (mean or plain)))
        reading = _step(model, demand, rows / stages, chunk)
        if not new_per_s:
            often, mean = 0.0, plain
        else:
            spare = chunk - new_per_s * (reading - plain)
            often = min(new_per_s * plain / spare, 1.0) if spare > 0 else 1.0
            mean = often * reading + (1 - often) * plain
        per_token = mean / (often + (1 - often) * gained)
        wanted = demand.rate * output * per_token
        if abs(wanted - rows) <= 1e-3 * max(rows, 1.0):
            break
        rows += 0.7 * (wanted - rows)
    full = _step(model, demand, rows / stages, budget)
    busy = new_per_s * full / budget
    if busy >= 1:
        return _over("compute")
    sigma = NormalDist().inv_cdf(share)
    rows_high = rows + sigma * math.sqrt(rows * (1 + demand.burstiness) / 2)
    if rows_high > room.max_rows:
        return _over("rows")
    if rows_high * demand.context > room.kv_tokens:
        return _over("kv cache")
    itl_high = reading if often > 1 - share else plain
    ttft, ttft_high = _first_token(model, demand, rows / stages, budget, full, mean, busy, share) if prefill else (0, 0)
    return Estimate(per_token, itl_high, ttft, ttft_high, rows, rows_high, busy, drafts=count, tokens_per_step=gained)


def _first_token(
    model: Roofline, demand: Demand, rows: float, budget: float, full: float, mean: float, busy: float, share: float
) -> tuple[float, float]:
    """Waiting for prompts that came before (Kingman's formula; its tail is exponential), and reading one's own."""
    service = demand.prompt * full / budget / model.split.pipeline
    wait = busy / (1 - busy) * (demand.burstiness + demand.prompt_spread) / 2 * service
    tail = wait / busy * math.log(busy / (1 - share)) if busy > 1 - share else 0.0

    def own(prompt: float) -> float:
        whole, rest = divmod(prompt, budget)
        return whole * full + (_step(model, demand, rows, rest) if rest else 0.0)

    usual, high = own(demand.prompt), own(demand.prompt_high)
    begun = mean / 2  # the step that is on its way when a request arrives
    return begun + wait + usual, begun + max(wait + high, max(tail, wait) + usual)


def _step(model: Roofline, demand: Demand, rows: float, prompt_tokens: float, drafts: int = 0) -> float:
    """A typical step. Rows are a mean here, so they need not be whole."""
    if rows <= 0 and prompt_tokens <= 0:
        rows = 1e-9
    if not prompt_tokens:
        return model.seconds(verifying(rows, rows * demand.context, drafts))
    chunks = max(1, round(prompt_tokens / demand.prompt))
    facts = Facts(
        decode_rows=rows,
        decode_context=rows * demand.context,
        prefill_tokens=prompt_tokens,
        prefill_pairs=prompt_tokens * demand.depth,
        prefill_context=chunks * 2 * demand.depth,
        chunks=chunks,
        sampled=rows + chunks,
    )
    return model.seconds(facts)


def _over(limit: str) -> Estimate:
    return Estimate(math.inf, math.inf, math.inf, math.inf, math.inf, math.inf, 1.0, limit)


def most_rate(
    model: Roofline, demand: Demand, room: Capacity, slo: Slo, *, prefill: bool = True, decode: bool = True
) -> float:
    """The highest rate at which one copy keeps the promise, by bisection; 0 if even a lone request breaks it."""

    def good(rate: float) -> bool:
        return estimate(model, demand.at(rate), room, slo.share, prefill=prefill, decode=decode).meets(slo)

    low, high = 0.0, 1e-3
    if not good(high):
        return 0.0
    while good(high) and high < 1e6:
        low, high = high, high * 4
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
