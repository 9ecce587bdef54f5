"""GrammarProposer: tokens that a request's grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engine.request import Request
from tokenmill.engine.speculation.proposer import Draft


class GrammarProposer:
    """They were looked for with the mask of the next token (`Constraint.forced`), and have masks themselves."""

    name = "grammar"
    kinds = 1
    on_device = 0

    def prior(self, kind: int, depth: int) -> float:
        return 0.99

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        forced = (() if one.grammar is None else one.grammar.forced[:length] for one in requests)
        return [Draft(list(tokens), [0] * len(tokens)) if tokens else None for tokens in forced]

    def ended(self, request: Request) -> None:
        pass

    def forget(self, salt: str | None = None) -> None:
        pass
