"""Says what a plan chose, why, what it expects, and what the runners-up lack; as text or as plain data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tokenmill.parallel.layout import why_not
from tokenmill.plan.planner.candidates import Placement
from tokenmill.plan.planner.search import BETTER, RESERVE, Choice, Plan
from tokenmill.plan.solve.drafts import Drafts, verifying
from tokenmill.plan.solve.offload import NEAR_RESIDENT, hiding_tokens
from tokenmill.plan.solve.roofline import facts_for

SHOWN = 5  # runners-up
MILLION = 1e6


def explain(plan: Plan) -> list[str]:
    ask, best, demand = plan.ask, plan.best, plan.demand
    lines = [
        f"model        {ask.shape.name}: {ask.shape.parameters / 1e9:.2f} billion parameters, "
        f"{ask.shape.kv_elements:,} cached elements per token",
        f"machines     {ask.fleet.name}",
        f"workload     {ask.work.summary()}",
        *([f"left out     {_left_out(plan)}"] if ask.left_out else []),
        f"promise      {ask.slo.text}",
        "",
        f"plan         {best.name}",
        *(f"  {name:<22} {value}  ({why})" for name, value, why in reasons(plan)),
        "",
        "expected     " + expectation(plan, best),
        *(f"             {line}" for line in best.placement.memory.lines(best.placement.room.kv_tokens)),
    ]
    if not plan.enough:
        lines += ["", "not enough   " + _shortage(plan)]
    if plan.others:
        lines += ["", "runners-up"]
        lines += [f"  {one.name}: {lacks(plan, one)}" for one in plan.others[:SHOWN]]
    if plan.refused:
        names = sorted({layout.name for layout, _ in plan.refused})
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        lines += ["", f"do not fit   {'; '.join(names[:SHOWN])}{more}"]
    if demand.burstiness > 2:
        lines.append(f"note         arrivals are bursty ({demand.burstiness:.1f}; Poisson has 1): first tokens wait")
    return lines


def reasons(plan: Plan) -> list[tuple[str, str, str]]:
    ask, best = plan.ask, plan.best
    layout, room, split = best.layout, best.placement.room, best.layout.split
    kv_losses = [one.layout.kv.loss for one in plan.others]
    found = [
        ("dtype", layout.dtype, ask.fleet.dtype_reason(ask.shape)),
        ("quantization", layout.weights.quantization or layout.weights.stored or "none", _weights_reason(plan)),
        (
            "kv_cache_dtype",
            layout.kv.dtype,
            "more rows fit, and less is read per token" if layout.kv.loss else _unrounded(plan, kv_losses),
        ),
        ("GPUs per copy", str(split.gpus), _split_reason(plan)),
        *([("parallel", str(split.layout), _parallel_reason(plan))] if split.gpus > 1 else []),
        ("copies", str(best.copies), _copies_reason(plan)),
        ("max_num_seqs", str(room.max_rows), f"{best.estimate.rows_high:.0f} rows decode at once at p{_share(plan)}"),
        ("max_num_batched_tokens", str(room.step_tokens), _budget_reason(plan)),
        ("max_model_len", str(ask.longest), _length_reason(plan)),
    ]
    if best.placement.step_time.stream is not None:
        found.append(("weights_offload", *_streamed(best.placement)))
    if ask.work.hash_ids is not None:
        found.append(("prefix cache", "on", f"{best.cached_share:.0%} of prompt tokens are found in it"))
    if (host := plan.host) is not None:
        link = (ask.fleet.host_bytes_per_s or 0.0) / 1e9
        why = (
            f"per copy: {host.cached_share:.0%} of prompt tokens are found then, and at {link:.0f} GB/s (not measured) "
            f"they come {host.faster:.0f} times as fast as they are computed; up to {host.rate:.2f} requests/s, were "
            "copies for nothing"
        )
        found.append(("kv_host_memory", f"{host.nbytes:,}", why))
    if ask.drafts is not None:
        found.append(("speculation", *_drafts(plan, ask.drafts)))
    return found


def _streamed(placement: Placement) -> tuple[str, str]:
    model = placement.step_time
    stream, away, cached = model.stream, placement.memory.streamed, placement.memory.cached
    assert stream is not None
    if stream.by_expert:
        shape = model.shape
        nbytes = cached.bytes_of_token(shape.top_k)
        why = (
            f"{cached.slots} of {cached.experts} experts of every layer stay, those that were chosen last; others come "
            "from the host's memory when a step chooses them: were all chosen equally often, a token alone would wait "
            f"for {nbytes / 1e9:.2f} GB, {nbytes / stream.bytes_per_s:.2g} s at {stream.bytes_per_s / 1e9:.0f} GB/s "
            "(not measured)"
        )
        return f"{cached.nbytes:,}", why
    some, more = (replace(model, stream=None).seconds(facts_for(model.shape, (), [(0, n, 1)])) for n in (2048, 4096))
    hides = hiding_tokens(stream.seconds, (more - some) / 2048)
    why = (
        f"{len(away.layers)} of {model.shape.layers} layers do not fit, and are brought from the host's memory in "
        f"every step: {stream.seconds:.2g} s of it at {stream.bytes_per_s / 1e9:.0f} GB/s (not measured), which steps "
        f"of {hides:,} tokens and more hide at {NEAR_RESIDENT:.0%} of the speed without"
    )
    return f"{away.nbytes:,}", why


def _drafts(plan: Plan, drafts: Drafts) -> tuple[str, str]:
    seen, model, context = plan.best.estimate, plan.best.placement.step_time, plan.demand.context
    if not seen.drafts:
        return "off", f"with {drafts.name} no step would bring more tokens per second"
    rows = max(seen.rows / model.split.pipeline, 1.0)
    plain, longer = (model.seconds(verifying(rows, rows * context, count)) for count in (0, seen.drafts))
    brings = f"{seen.tokens_per_step:.2f} tokens per row and takes {longer / plain:.2f} times as long"
    return f"{seen.drafts} per row", f"with {drafts.name} a step that only decodes brings {brings}"


def expectation(plan: Plan, choice: Choice) -> str:
    seen = choice.estimate
    words = [
        f"up to {choice.rate:.2f} requests/s"
        + (" within the promise" if plan.ask.slo.promises else "")
        + (f", {plan.needed:.2f}/s come in a busy minute" if plan.needed else ""),
        f"TTFT {_ms(seen.ttft)} (p{_share(plan)} {_ms(seen.ttft_high)})",
        f"ITL {_ms(seen.itl)} (p{_share(plan)} {_ms(seen.itl_high)})",
    ]
    cost = price_per_million(plan, choice)
    return "; ".join(words) + (f"; {cost:.3f} per million tokens" if cost is not None else "")


def price_per_million(plan: Plan, choice: Choice) -> float | None:
    """What a million tokens cost, read or written, at the rate that is needed (or the most, where that is less)."""
    rate = min(choice.rate, plan.needed) if plan.needed else choice.rate
    if plan.ask.price is None or rate <= 0:
        return None
    work = plan.ask.load
    tokens = (sum(work.prompts) + sum(work.outputs)) / len(work)
    return plan.ask.price * choice.gpus / 3600 / (rate * tokens) * MILLION


def lacks(plan: Plan, other: Choice) -> str:
    best = plan.best
    carries = f"carries {other.rate:.2f}/s"
    if other.rate <= 0:
        return f"breaks the promise for a lone request (TTFT {_ms(other.estimate.ttft_high)}, ITL " + (
            f"{_ms(other.estimate.itl_high)})"
        )
    if math.isinf(plan.ask.wanted):
        return f"{carries} on {_gpus(other)}, the plan {best.rate:.2f} on {best.gpus}"
    if other.rate < plan.ask.wanted and plan.enough:
        return f"{carries} on {_gpus(other)}, {plan.ask.wanted:.2f} are wanted with {RESERVE - 1:.0%} in reserve"
    if not plan.enough:
        return f"{carries} on {_gpus(other)}, the plan {best.rate:.2f} on {best.gpus}"
    if other.gpus > best.gpus:
        return f"takes {other.gpus} GPUs where {best.gpus} do ({carries})"
    if _rounded(other) > _rounded(best):
        return f"rounds more than is needed ({carries})"
    if other.prefill_copies and not best.prefill_copies:
        return f"moves keys and values between machines, and nothing is gained by it ({carries})"
    if other.layout.split.gpus > best.layout.split.gpus:
        return f"divides the model more than is needed ({carries})"
    if other.layout.split != best.layout.split:
        return f"passes every token through stages or shuffles experts ({carries})"
    return f"less room to grow: {carries}"


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan for programs."""

    def one(choice: Choice) -> dict[str, Any]:
        layout, room, seen = choice.layout, choice.placement.room, choice.estimate
        return {
            "name": choice.name,
            "gpus": choice.gpus,
            "copies": choice.copies,
            "prefill_copies": choice.prefill_copies,
            "tensor_parallel": layout.split.tensor,
            "pipeline_parallel": layout.split.pipeline,
            "expert_parallel": layout.split.expert,
            "parallel": str(layout.split.layout) if layout.split.gpus > 1 else None,
            "dtype": layout.dtype,
            "quantization": layout.weights.quantization,
            "stored": layout.weights.stored or None,
            "kv_cache_dtype": layout.kv.dtype,
            "max_num_seqs": room.max_rows,
            "max_num_batched_tokens": room.step_tokens,
            "kv_tokens": room.kv_tokens,
            "requests_per_s": choice.rate,
            "ttft_s": _finite(seen.ttft),
            "ttft_high_s": _finite(seen.ttft_high),
            "itl_s": _finite(seen.itl),
            "itl_high_s": _finite(seen.itl_high),
            "drafts": seen.drafts,
            "tokens_per_step": seen.tokens_per_step,
            "memory_bytes": choice.placement.memory.total,
            "price_per_million_tokens": price_per_million(plan, choice),
        }

    return {
        "model": plan.ask.shape.name,
        "machines": plan.ask.fleet.name,
        "workload": plan.ask.work.summary(),
        "left_out_requests": plan.ask.left_out,
        "needed_requests_per_s": plan.needed,
        "enough": plan.enough,
        "plan": one(plan.best),
        "reasons": {name: {"value": value, "why": why} for name, value, why in reasons(plan)},
        "runners_up": [{**one(other), "why_not": lacks(plan, other)} for other in plan.others[:SHOWN]],
        "do_not_fit": sorted({layout.name for layout, _ in plan.refused}),
    }


def _left_out(plan: Plan) -> str:
    ask = plan.ask
    whose = "that max_model_len allows" if ask.limit < ask.shape.max_positions else "that the model can take"
    count = f"{ask.left_out:,} of {len(ask.work):,} requests"
    return f"{count}: longer, with the answer, than the {ask.limit:,} tokens {whose}; nothing below counts them"


def _length_reason(plan: Plan) -> str:
    ask = plan.ask
    if ask.max_len is not None:
        return "as asked for" if ask.longest == ask.max_len else "all that the model can take"
    return "the longest request of the workload" + (" that the model can take" if ask.left_out else "")


def _weights_reason(plan: Plan) -> str:
    weights = plan.best.layout.weights
    if weights.stored:
        return "as the checkpoint stores it"
    return _gain(plan) if weights.loss else _unrounded(plan, [one.layout.weights.loss for one in plan.others])


def _unrounded(plan: Plan, losses: list[int]) -> str:
    """Why something stays as it is, from what the runners-up would lose of it."""
    if not any(losses):
        return "--quality exact rounds nothing" if plan.ask.quality == "exact" else "there is no other form here"
    if not plan.enough or not plan.needed:
        return f"rounding gains less than {BETTER - 1:.0%}"
    return f"{'the promise is kept' if plan.ask.slo.promises else 'the load is carried'} without rounding it"


def _gain(plan: Plan) -> str:
    plain = next((one for one in plan.others if one.layout.weights.loss == 0), None)
    if plain is None:
        return "unrounded weights fit in no way"
    return f"unrounded ({plain.name}) carries {plain.rate:.2f}/s on {_gpus(plain)}"


def _split_reason(plan: Plan) -> str:
    split = plan.best.layout.split
    if split.gpus == 1 and plan.best.placement.memory.cached.slots:
        return "there are too few to divide the model among them, so experts of it are cached"
    if split.gpus == 1 and plan.best.placement.memory.streamed.layers:
        return "there are too few to divide the model among them, so layers of it are streamed"
    if split.gpus == 1:
        return "the model fits into one, and dividing it costs exchanges"
    alone = [layout for layout, _ in plan.refused if layout.split.gpus < split.gpus]
    if alone and all(one.layout.split.gpus >= split.gpus for one in plan.others):
        return f"{split.name}: it fits into no fewer"
    slow = "too slow for the promise" if plan.ask.slo.promises else "slower"
    return f"{split.name}: fewer GPUs per copy are {slow}, or take more in all"


def _parallel_reason(plan: Plan) -> str:
    """What its ranks have, and whether this version can run them."""
    split = plan.best.layout.split
    has = [
        f"{split.pipeline} stages of layers, with as many steps in flight" if split.pipeline > 1 else "",
        f"heads and columns in {split.tensor}" if split.tensor > 1 else "",
        f"whole experts over {split.tensor * split.expert} ranks" if split.expert > 1 else "",
    ]
    missing = why_not(split.layout, plan.ask.fleet.device)
    return ", ".join(filter(None, has)) + (f"; {missing}" if missing is not None else "")


def _copies_reason(plan: Plan) -> str:
    best = plan.best
    if best.prefill_copies:
        return f"{best.prefill_copies} read prompts so that nobody who decodes waits for one"
    if not plan.needed:
        return "as many as there are GPUs for"
    return f"each carries {best.rate / best.copies:.2f} of {plan.needed:.2f} requests/s"


def _budget_reason(plan: Plan) -> str:
    seen, slo = plan.best.estimate, plan.ask.slo
    if math.isfinite(slo.itl):
        return f"the most that leaves ITL at {_ms(seen.itl_high)}, with room to grow"
    return "prompts are read at full speed from here on"


def _shortage(plan: Plan) -> str:
    best = plan.best
    if best.rate <= 0:
        return "not even a lone request keeps the promise; a smaller model, more GPUs per copy or more patience would"
    return (
        f"it carries {best.rate:.2f} of {plan.ask.wanted:.2f} requests/s ({RESERVE - 1:.0%} in reserve); about "
        f"{math.ceil(plan.ask.wanted / (best.rate / best.gpus))} GPUs of this kind would do"
    )


def _gpus(choice: Choice) -> str:
    return f"{choice.gpus} GPU{'s' if choice.gpus > 1 else ''}"


def _rounded(choice: Choice) -> int:
    return choice.layout.weights.loss + choice.layout.kv.loss


def _share(plan: Plan) -> str:
    return f"{plan.ask.slo.share * 100:g}"


def _ms(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "without end"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
