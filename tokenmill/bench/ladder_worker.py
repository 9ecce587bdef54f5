"""Rungs of the ladder in a process of their own, so that peak memory is theirs: questions and answers as JSON lines.

Run as `python -m tokenmill.bench.ladder_worker`, with any number of these on stdin, one a line:

    {"model", "options", "asks": [[prompt, tokens], ...], "warm": [...], "limit": seconds, "single": bool, "repeats": n}
    {"model", "options", "judge": [[ids, expected, chosen], ...], "limit": seconds}

Lines out for each: {"done", "of", "what"} on the way, at last {"found": ...} or {"error": ...}.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenmill.bench.offline import memory_of, steps_of
from tokenmill.bench.peers.serve import begin_answers
from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.llm import LLM

Tell = Callable[..., None]
Ask = tuple[str | list[int], int]  # a prompt, and how many tokens to answer with
WATCHED = 8  # of so many steps one is looked at
WIDTH = 20  # log-probabilities that a judge asks for


class KVWatch:
    """What is held of the KV cache, and how much of that is empty."""

    def __init__(self, llm: LLM) -> None:
        self._scheduler = llm._built.engine.scheduler.parts[0]
        state = llm._built.engine.runner.state  # type: ignore[attr-defined]
        arenas = [one for one in (state.arena, state.scales) if one is not None]
        pool = self._scheduler.kv.pool
        self._block_bytes = sum(one.numel() * one.element_size() for one in arenas) / pool.num_blocks
        self._steps = self._peak = self._held = self._filled = 0

    def look(self) -> None:
        pool, size = self._scheduler.kv.pool, self._scheduler.kv.block_size
        held = pool.num_blocks - pool.num_free
        self._peak = max(self._peak, held)
        self._steps += 1
        if self._steps % WATCHED != 1:
            return
        filled: dict[int, int] = {}  # block -> tokens in it; shared ones count once
        for request in self._scheduler.running:
            for number, block in enumerate(request.blocks):
                filled[block] = max(filled.get(block, 0), min(size, max(0, request.num_computed - number * size)))
        self._held += held * size
        self._filled += sum(filled.values())

    def found(self) -> dict[str, float]:
        waste = 1 - self._filled / self._held if self._held else 0.0
        return {"blocks": self._peak, "bytes": self._peak * self._block_bytes, "waste": waste}


def measure(llm: LLM, asks: list[Ask], limit: float, single: bool, tell: Tell) -> dict[str, Any]:
    """Answer the requests, which are there from the start; none is begun after `limit` seconds, but all that were begun
    end. `single`: one after the other, and the first in any case.
    """
    processor, watch = llm._processor, KVWatch(llm)
    batching = llm._built.engine.scheduler.parts[0].batching
    llm.reset_prefix_cache()
    request_states = [processor.prepare(prompt, _params(tokens)) for prompt, tokens in asks]
    before, again = steps_of(llm), batching.recomputed
    began, moment = time.perf_counter(), processor.engine.clock()
    ended: set[int] = set()  # of the asks
    numbered = list(enumerate(request_states))
    for group in [[one] for one in numbered] if single else [numbered]:
        if ended and time.perf_counter() - began > limit:
            break
        for _, request_state in group:
            processor.submit(request_state)
        left = dict(group)
        while left:
            processor.step()
            watch.look()
            done = {index for index, request_state in left.items() if request_state.finished}
            if done:
                ended |= done
                tell(len(ended), len(asks))
            if time.perf_counter() - began > limit:
                late = {index for index, one in left.items() if one.leader.metrics.first_scheduled is None}
                for index in late:
                    processor.cancel(request_states[index])
                done |= late
            left = {index: one for index, one in left.items() if index not in done} if done else left
    seconds = time.perf_counter() - began
    answers = []
    for index in sorted(ended):
        request_state = request_states[index]
        if request_state.leader.error is not None:
            raise RuntimeError(request_state.leader.error)
        metrics = request_state.leader.metrics
        answers.append(
            {
                "index": index,
                "prompt": list(request_state.leader.tokens[: request_state.leader.prompt_len]),
                "tokens": list(request_state.leader.output),
                "gaps": [after - before for before, after in pairwise(metrics.token_times)],
                "ttft": metrics.token_times[0] - moment,
                "e2e": (metrics.finished or moment) - moment,
            }
        )
    return {
        "seconds": seconds,
        "answers": answers,
        "steps": steps_of(llm) - before,
        "recomputed": batching.recomputed - again,
        "kv": watch.found(),
    }


def judge(llm: LLM, cases: list[tuple[list[int], int, int]], limit: float) -> list[float]:
    """How far apart the expected and the chosen token are, in log-probability; at least so much. Of the first cases:
    none is begun after `limit` seconds.
    """
    gaps: list[float] = []
    began = time.perf_counter()
    for ids, expected, chosen in cases:
        if gaps and time.perf_counter() - began > limit:
            break
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=WIDTH, detokenize=False)
        table = (llm.generate([ids], params, use_tqdm=False)[0].outputs[0].logprobs or [{}])[0]
        known = {token: one.logprob for token, one in table.items()}
        least = min(known.values())
        gaps.append(abs(known.get(expected, least) - known.get(chosen, least)))
    return gaps


def run(question: dict[str, Any], tell: Tell) -> dict[str, Any]:
    from tokenmill import LLM

    _forget()
    with LLM(question["model"], progress=tell, **question["options"]) as llm:
        if "judge" in question:
            return {"gaps": judge(llm, question["judge"], question["limit"])}
        llm.generate(
            [prompt for prompt, _ in question["warm"]], [_params(n) for _, n in question["warm"]], use_tqdm=False
        )
        how = question["limit"], question["single"], tell
        runs = [measure(llm, question["asks"], *how) for _ in range(question["repeats"])]
        found = sorted(runs, key=lambda one: float(one["seconds"]))[len(runs) // 2]
        return found | {"memory": memory_of(llm), "report": llm.plan_lines()}


def _forget() -> None:
    """Give back what the engine before this one held on the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)


def main() -> None:
    say = begin_answers()
    for line in sys.stdin:
        try:
            found = run(json.loads(line), lambda done, of, what=None: say({"done": done, "of": of, "what": what}))
        except Exception as error:  # whatever a rung cannot do here is a line of the table
            say({"error": f"{type(error).__name__}: {error}"})
            raise
        say({"found": found})


if __name__ == "__main__":
    main()
