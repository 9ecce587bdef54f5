"""Leaps: a stretch of steps in which everybody only decodes, taken at once. For simulation, where tokens are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmill.engine.request import Request
from tokenmill.engine.scheduler.scheduler import Scheduler


def steady_steps(scheduler: Scheduler, in_flight: int, tokens_left: Callable[[Request], int]) -> int:
    """For how many steps nothing but decoding can happen, whatever arrives (0: the next step has to be scheduled).

    `in_flight` is the number of launched steps, each of which must hold all who run. Newcomers change nothing while no
    row is free; the caller ends the leap at the first newcomer when one is. `tokens_left(request)` is how many tokens
    are still to be committed; the step that ends a request is left to the scheduler, and so is any shortage of blocks.
    """
    running, kv = scheduler.running, scheduler.kv
    if not running or scheduler.isolation.suspects or scheduler.life.parked:
        return 0
    if len(scheduler.waiting) and (scheduler.has_free_row or scheduler.policy.promote_after is not None):
        return 0
    steps = min(tokens_left(request) for request in running) - 1
    if steps < 1:
        return 0
    size, blocks = kv.block_size, 0
    for request in running:
        ahead = len(request.tokens) + request.pending - request.num_computed
        if request.num_computed < request.prompt_len:  # even its last token is a chunk of the prompt
            return 0
        if ahead != 1 or request.drafts or request.waits_for or request.grammar:
            return 0
        if request.in_flight != in_flight or request.pending != in_flight:  # a launched step has no token of it
            return 0
        missing = request.num_computed + steps - len(request.blocks) * size
        if missing > 0:
            blocks += -(-missing // size)
    return steps if blocks <= kv.pool.num_free else 0


def leap(scheduler: Scheduler, times: Sequence[float], token_of: Callable[[Request], int]) -> None:
    """Do the steps that are committed at these times. Launched steps stay launched, now that many tokens further on."""
    steps, kv = len(times), scheduler.kv
    for request in scheduler.running:
        request.tokens += [token_of(request)] * steps
        request.metrics.token_times += times
        request.num_computed += steps
        if request.num_computed > len(request.blocks) * kv.block_size:
            kv.grow(request, request.num_computed)
        kv.publish(request)
    scheduler.stats.steps += steps
    scheduler.stats.tokens += steps * len(scheduler.running)
