"""Beams: one user request searched by several sequences that share their past through copy-on-write."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.engine.request import Finish, Request
from tokenmill.engine.step import NOT_FINITE
from tokenmill.sampling.beam import BeamGroup
from tokenmill.sampling.records import TokenLogprobs


@dataclass
class Turn:
    """What a finished round asks of the scheduler."""

    finish: Finish | None = None  # the search is over
    forks: list[Request] = field(default_factory=list)  # have new tokens, and start over from their fork_from


class Beams:
    """A round: every live beam runs one step, the best continuations are chosen, beams are kept, dropped or forked.

    The leader is the request that the user knows; it lives as long as the search, as one beam or another.
    """

    def __init__(self, leader: Request) -> None:
        params = leader.params
        assert params.beam_width is not None
        self.leader = leader
        self.live = [leader]
        self.group = BeamGroup(
            width=params.beam_width,
            num_return=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            stop_ids=leader.stop_ids,
            max_new_tokens=leader.max_tokens,
        )
        self._candidates: dict[str, list[tuple[int, float]]] = {}
        self._broken = False
        self._born = 0

    def collect(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        """A beam's step came back; it stays held until the round is complete."""
        self._broken = self._broken or -1 in tokens
        self._candidates[request.id] = logprobs[0].top if logprobs else []

    def advance(self, now: float) -> Turn | None:
        """Finish the round if every live beam is in, else None."""
        if any(request.id not in self._candidates for request in self.live):
            return None
        if self._broken:
            self.leader.error = NOT_FINITE
            return Turn(finish=Finish.ERROR)
        chosen = self.group.advance([self._candidates[request.id] for request in self.live])
        self._candidates = {}
        self.leader.metrics.token_times.append(now)
        if not chosen:
            stopped = self.group.results()[0].finished_by_stop
            return Turn(finish=Finish.STOP if stopped else Finish.LENGTH)
        return self._continue(chosen)

    def _continue(self, chosen: list[tuple[int, int]]) -> Turn:
        parents, pasts = list(self.live), [list(request.tokens) for request in self.live]
        kept = {parent for parent, _ in chosen}
        dropped = [request for number, request in enumerate(parents) if number not in kept]
        turn, used, self.live = Turn(), set(), []
        for parent, token in chosen:
            tokens = [*pasts[parent], token]
            if parent not in used:  # the first continuation of a beam goes on in place
                used.add(parent)
                request = parents[parent]
                request.tokens = tokens
            else:
                request = dropped.pop() if dropped else self._new_beam()
                request.tokens = tokens
                request.identities = []
                request.fork_from, request.fork_tokens = parents[parent], len(pasts[parent])
                turn.forks.append(request)
            request.waits_for = None
            self.live.append(request)
        assert not dropped, "the search keeps as many beams as it has"
        return turn

    def _new_beam(self) -> Request:
        self._born += 1
        leader = self.leader
        beam = Request(
            f"{leader.id}/beam{self._born}",
            leader.tokens[: leader.prompt_len],
            leader.params,
            max_tokens=leader.max_tokens,
            seed=leader.seed,
            stop_ids=leader.stop_ids,
            priority=leader.priority,
            arrival=leader.arrival,
            deadline=leader.deadline,
            salt=leader.salt,
            adapter=leader.adapter,
        )
        beam.adapter_key = leader.adapter_key
        beam.beams = self
        return beam
