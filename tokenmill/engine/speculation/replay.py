"""ReplayProposer: drafts of answers that are known, each token right with a set probability.

With random weights no proposer can guess what a model says. What drafts cost and bring at a given acceptance can be
measured all the same: the requests are answered once without drafts, and again with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tokenmill.engine.request import Request
from tokenmill.engine.speculation.proposer import Draft


class ReplayProposer:
    """Which tokens are wrong is drawn once for an answer, so that each is right with the same probability, whatever was
    drafted before it.
    """

    name = "replay"
    kinds = 1
    on_device = 0

    def __init__(self, acceptance: float, length: int, vocab: int, seed: int = 0) -> None:
        self._acceptance, self._length, self._vocab = acceptance, length, vocab
        self._random = Random(seed)
        self._drafts: dict[tuple[int, ...], list[int]] = {}  # by prompt
        self._of_request: dict[str, list[int]] = {}  # a prompt is looked up once

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """This prompt is answered so."""
        self._drafts[tuple(prompt)] = [
            token if self._random.random() < self._acceptance else (token + 1) % self._vocab for token in answer
        ]

    def prior(self, kind: int, depth: int) -> float:
        return self._acceptance

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        found: list[Draft | None] = []
        for one in requests:
            drafts = self._of_request.get(one.id)
            if drafts is None:
                drafts = self._drafts.get(tuple(one.tokens[: one.prompt_len]), [])
                self._of_request[one.id] = drafts
            end = one.num_output + min(length, one.pending + one.unsure + self._length)
            tokens = drafts[one.num_output : end]
            found.append(Draft(tokens, [0] * len(tokens)) if tokens else None)
        return found

    def ended(self, request: Request) -> None:
        self._of_request.pop(request.id, None)

    def forget(self, salt: str | None = None) -> None:
        """What was learned is what is measured: to forget it would be to measure something else."""
