"""HeadProposer: drafts of a trained head, on a device that computes steps while they are launched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.engine.request import Request
from tokenmill.engine.runner.drafters import Verified, VerifiedTrees
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.speculation.head_runner import Behind, DraftingHead, single_queries
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.engine.speculation.recorded_head import RecordedHead, chances
from tokenmill.engine.step import DRAFTED
from tokenmill.errors import ModelError
from tokenmill.sampling.sampler import Sampler

FEW_ENTRIES = 16  # of a step, that a head drafts behind as fast as it is found out which of them count
LEAST = 0.2  # a chain that the head itself believes in no more than this is not drafted further
CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # below each a kind of its own


class HeadProposer:
    """Starts from the hidden state that a row's newest token was sampled from, which a step leaves behind."""

    name = "head"
    kinds = len(CONFIDENCE) + 1
    on_device = 0

    def __init__(self, head: DraftingHead, state: DeviceState, sampler: Sampler, recorded: RecordedHead | None) -> None:
        self._head, self._state, self._sampler = head, state, sampler
        self._recorded = recorded  # the same, where the native library computes it

    def prior(self, kind: int, depth: int) -> float:
        return (0.0, *CONFIDENCE)[kind] * 0.9 + 0.05

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(requests)
        at = self._state.hidden_at.tolist()
        known = [i for i, one in enumerate(requests) if one.pending == 0 and at[one.row] == len(one.tokens) - 2]
        if not known or self._state.hidden is None:
            return drafts
        rows = torch.tensor([requests[i].row for i in known])
        traits = self._sampler.traits(rows.tolist())
        positions = torch.tensor([len(requests[i].tokens) for i in known])
        ids = torch.tensor([requests[i].tokens[-1] for i in known])
        state = self._enter(self._state.hidden[rows], rows, positions - 1)
        behind = self._behind(rows, positions - 1) if self._head.attends and self._recorded is None else None
        found: list[tuple[list[int], list[int]]] = [([], []) for _ in known]
        believed = np.ones(len(known))
        for depth in range(min(self._head.length, length)):
            state, logits, best = self._step(state, ids, behind if depth == 0 else None)
            ids = self._head.choose(logits, best, rows, positions + depth, traits)
            likely = chances(logits, self._head.places[ids])
            believed = believed * likely
            if not np.isfinite(believed).all():
                raise ModelError("the logits of the draft head are not finite")
            for (tokens, kinds), token, kind in zip(
                found, ids.tolist(), np.searchsorted(CONFIDENCE, likely).tolist(), strict=True
            ):
                tokens.append(token)
                kinds.append(kind)
            if believed.max() < LEAST:
                break
        for i, (tokens, kinds) in zip(known, found, strict=True):
            drafts[i] = Draft(tokens, kinds)
        return drafts

    def _enter(self, hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """positions: of the tokens that come next, which are the first that the rows have not cached."""
        if self._recorded is None:
            return self._head.enter(hidden)
        self._recorded.enter(hidden, rows, positions)
        return None

    def _behind(self, rows: torch.Tensor, positions: torch.Tensor) -> Behind:
        each = torch.arange(len(rows) + 1, dtype=torch.int32)
        host = rows.tolist(), positions.tolist()
        return Behind(positions, single_queries(self._state, rows.int(), positions.int(), each, host))

    def _step(
        self, state: torch.Tensor | None, ids: torch.Tensor, behind: Behind | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        if self._recorded is not None:
            return None, *self._recorded.step(ids)
        assert state is not None
        return *self._head.step(state, ids, behind), None

    def ended(self, request: Request) -> None:
        pass

    def forget(self, salt: str | None = None) -> None:
        pass


class DeviceHead:
    """The same head at the end of a recorded step: its drafts stay on the device, and the host knows their number."""

    name = "head"
    kinds = 1

    def __init__(self, head: DraftingHead, state: DeviceState, most: int) -> None:
        """most: tokens of a step that only decodes, drafts included."""
        self._head, self._state = head, state
        device = state.tokens.device
        self._one_query_each = torch.arange(most + 1, dtype=torch.int32, device=device)
        # [table rows]: a row's last token is sampled where no position is, and nobody's row has nothing to attend to
        self._last_position = torch.full((len(state.tokens),), state.max_len - 1, device=device)
        self._last_position[state.scratch_row] = 0
        self.on_device = min(DRAFTED, head.length)
        self.failure: Exception | None = None
        self.branches = head.branches and self.on_device == DRAFTED
        self.kind = f"head of {head.shape}, {self.on_device} tokens"

    def prior(self, kind: int, depth: int) -> float:
        return 0.5

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        return [None] * len(requests)  # nobody on the host knows them

    def draft(self, verified: Verified) -> None:
        hidden, tokens, rows = verified.hidden, verified.tokens, verified.rows
        positions, traits = verified.positions, verified.traits
        if verified.queries > 1 and len(rows) > FEW_ENTRIES:
            at = verified.newest(self._state.scratch_row)
            hidden, tokens, rows, positions = (one.index_select(0, at) for one in (hidden, tokens, rows, positions))
        state = self._head.enter(hidden)
        behind = self._behind(rows, positions) if self._head.attends else None
        for depth in range(self.on_device):
            state, logits = self._head.step(state, tokens, behind if depth == 0 else None)
            if not traits.warm:
                tokens = self._head.pick(logits, rows, self._state.drafts, depth)
                continue
            tokens = self._head.choose(logits, None, rows, positions + 1 + depth, traits)
            self._state.drafts[rows, depth] = tokens

    def grow(self, verified: VerifiedTrees) -> None:
        tokens, rows, positions = verified.tokens, verified.rows, verified.positions
        state, scores = self._head.enter(verified.hidden), None
        behind = self._behind(rows, positions) if self._head.attends else None
        noise = self._head.noise(rows, positions, verified.traits)
        for depth in range(DRAFTED):
            state, logits = self._head.step(state, tokens, behind if depth == 0 else None)
            tokens, state, scores = self._head.branch(logits, state, scores, rows, self._state, depth, noise)

    def _behind(self, rows: torch.Tensor, positions: torch.Tensor) -> Behind:
        """As many tokens are cached before a position as it says."""
        at = torch.empty_like(rows, dtype=torch.int32)
        torch.minimum(positions, self._last_position[rows], out=at)
        return Behind(at, single_queries(self._state, rows.int(), at, self._one_query_each[: len(rows) + 1]))

    def ended(self, request: Request) -> None:
        pass

    def forget(self, salt: str | None = None) -> None:
        pass
