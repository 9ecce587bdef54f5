"""`tokenmill bench latency --draft-acceptance`: the same batches without drafts, and with drafts of known answers."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tokenmill.bench.latency import Batch, answer
from tokenmill.bench.workloads import Ask, Mix
from tokenmill.engine.runner.torch_runner import ASYNC_DEVICES
from tokenmill.engine.speculation.choose import PER_TOKEN
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.engine.speculation.replay import ReplayProposer
from tokenmill.engine.speculation.speculation import DraftStats, Speculation
from tokenmill.errors import StepFailed

if TYPE_CHECKING:
    from tokenmill.llm import LLM


# Steps with drafts round their sums otherwise in 16 bits, and random weights choose between near ties: where the answer
# is another, drafts behind that are all wrong. So then what was said with drafts is drafted, and it is answered again.
TRIES = 3


class Replay:
    """Answers batches without drafts and with them. Nothing of the engine is stood in for but what is drafted: how many
    drafts a step verifies, and whether any, is decided as ever.
    """

    def __init__(self, llm: LLM, acceptance: float, length: int, seed: int) -> None:
        engine, vocab = llm._built.engine, llm._processor.vocab_size
        limits, device = engine.scheduler.limits, getattr(engine.runner, "device", None)
        kind = "cpu" if device is None else device.type
        self._llm, self._proposer = llm, ReplayProposer(acceptance, length, vocab, seed)
        most = max(limits.max_rows, limits.max_verified)
        self._speculation = Speculation(most, PER_TOKEN.get(kind, 0.2), [self._proposer])
        self._speculation.beside = kind in ASYNC_DEVICES
        self.stats = DraftStats()  # of the batches that were answered with drafts, the last time each
        engine.speculation = None

    def answer(self, asks: list[Ask]) -> tuple[Batch, Batch]:
        """A batch without drafts and the same with them, in turns: what else runs on the machine slows both."""
        engine = self._llm._built.engine
        plain = drafted = answer(self._llm, asks)
        counted = self._speculation.stats[self._proposer.name]
        before = replace(counted)
        engine.speculation, failed = self._speculation, engine.scheduler.stats.failed_steps
        try:
            for _ in range(TRIES):
                known, before = drafted.texts, replace(counted)
                for prompt, said in known:
                    self._proposer.learn(prompt, said)
                drafted = answer(self._llm, asks)
                if drafted.texts == known:
                    break
                self._speculation.payoff = Payoff()  # wrong drafts say nothing about those of the next try
        finally:
            engine.speculation, engine.scheduler.drafting = None, False
        self.stats.drafted += counted.drafted - before.drafted
        self.stats.accepted += counted.accepted - before.accepted
        self.stats.steps += counted.steps - before.steps
        if failed := engine.scheduler.stats.failed_steps - failed:  # they were computed again, which is not what counts
            raise StepFailed(f"{failed} steps with drafts failed, so there is nothing to compare; the log says why")
        return plain, drafted


def repeated(
    llm: LLM, mix: Mix, seed: int, repeats: int, warm_up: int, acceptance: float, length: int
) -> tuple[list[Batch], dict[str, Any]]:
    """Batches without drafts, as `latency.repeated` answers them, and what drafts made of the same requests."""
    replay = Replay(llm, acceptance, length, seed)
    for number in range(warm_up):
        replay.answer(mix.asks(seed + number))
    before = replace(replay.stats)
    pairs = [replay.answer(mix.asks(seed + number)) for number in range(warm_up, warm_up + repeats)]
    drafted, accepted = replay.stats.drafted - before.drafted, replay.stats.accepted - before.accepted
    rows = replay.stats.steps - before.steps
    rate, faster = (statistics.median(map(_decoded_per_second, side)) for side in zip(*pairs, strict=True))
    same = sum(one == other for pair in pairs for one, other in zip(pair[0].texts, pair[1].texts, strict=True))
    return [plain for plain, _ in pairs], {
        "acceptance": acceptance,
        "draft_tokens": length,
        "tokens_per_second": rate,
        "tokens_per_second_with_drafts": faster,
        "times_as_fast": faster / rate,
        "drafted": drafted,
        "accepted": accepted,
        "accepted_length": accepted / rows if rows else 0.0,  # drafts that held, of a row that had any
        "same_answers": same,
        "answers": sum(len(plain.texts) for plain, _ in pairs),
    }


def lines(points: list[dict[str, Any]]) -> list[str]:
    """A row per batch size."""
    first = points[0]["drafts"]
    out = [
        "",
        f"decoding with up to {first['draft_tokens']} drafts per step and row, each right with probability "
        f"{first['acceptance']:g}",
        f"{'batch':>5}{'without/s':>12}{'with/s':>12}{'times':>8}{'verified':>10}{'held':>7}{'held/row':>10}"
        f"{'same answers':>15}",
    ]
    for point in points:
        one = point["drafts"]
        held = one["accepted"] / one["drafted"] if one["drafted"] else 0.0
        same = f"{one['same_answers']} of {one['answers']}"
        out.append(
            f"{point['batch']:>5}{one['tokens_per_second']:>12.1f}{one['tokens_per_second_with_drafts']:>12.1f}"
            f"{one['times_as_fast']:>8.2f}{one['drafted']:>10}{held:>7.0%}{one['accepted_length']:>10.2f}"
            f"{same:>15}"
        )
    return out


def _decoded_per_second(batch: Batch) -> float:
    """From the moment on at which all have their first token."""
    tokens = sum(answer.output_tokens for answer in batch.run.answers) - batch.prefill_tokens
    return tokens / (batch.run.seconds - batch.prefill)
