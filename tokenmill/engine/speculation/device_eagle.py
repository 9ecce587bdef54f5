"""DeviceEagle: an EAGLE-3 head on a GPU, at the end of recorded steps that verify drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tokenmill.engine.request import Request
from tokenmill.engine.runner.drafters import Verified
from tokenmill.engine.runner.paths import PreparedStep
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.eagle import EagleRunner
from tokenmill.engine.speculation.head_runner import single_queries
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.engine.step import DRAFTED
from tokenmill.model.eagle import EagleHead
from tokenmill.ops.types import AttentionBatch
from tokenmill.sampling.settings import Traits


class DeviceEagle:
    """Its drafts stay on the device, and the host knows their number.

    Steps that read prompts write their entries, too. Those of plain decode steps, in which drafting rests, are missing:
    behind them a row's drafts are worse for a while.
    """

    name = "head"
    kinds = 1

    def __init__(self, head: EagleHead, runner: TorchRunner, most: int) -> None:
        """most: tokens of a step that only decodes, drafts included."""
        self._head = EagleRunner(head, runner, spare_blocks=most)
        self._state, device = runner.state, runner.device
        self._scratch_row, self._block_size = runner.state.scratch_row, runner.state.block_size
        self._places = torch.arange(most + 1, device=device)
        self._columns = torch.arange(runner.state.max_blocks, device=device)
        # [table rows]: nobody's row has nothing to attend to
        self._last_position = torch.full((len(self._state.tokens),), self._state.max_len - 1, device=device)
        self._last_position[self._scratch_row] = 0
        self.layers = head.layers
        self.failure: Exception | None = None
        self.on_device = min(DRAFTED, self._block_size, self._head.length)  # a draft lies in the next block at most
        flags = head.norm_before_residual, head.norm_output, head.feature_norms
        self.kind = f"EAGLE head of {self._head.shape}, {head.spec}, {flags}, {self.on_device} tokens"

    def prior(self, kind: int, depth: int) -> float:
        return 0.5

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        return [None] * len(requests)  # nobody on the host knows them

    def read(self, prepared: PreparedStep) -> None:
        if self.failure is not None:
            return
        try:
            self._head.read(prepared)
        except Exception as error:  # the step is as good as without a head
            self.failure = error

    def draft(self, verified: Verified) -> None:
        head, batch, traits = self._head, verified.batch, verified.traits
        assert batch is not None and batch.features is not None
        attention = replace(batch.attention, cache={})  # of other heads
        state = head.run(head.enter(batch.features.states), verified.tokens, batch.positions, batch.slots, attention)
        state, rows, positions = self._newest(verified, state)
        tables = self._tables(rows, positions)
        tokens = self._pick(state, rows, positions, 0, traits)
        for depth in range(1, self.on_device):
            at = torch.minimum(positions + depth, self._last_position[rows])
            state = head.run(state, tokens, at, self._slots(tables, rows, at), self._behind(tables, at))
            tokens = self._pick(state, rows, positions, depth, traits)

    def _pick(
        self, state: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, depth: int, traits: Traits
    ) -> torch.Tensor:  # [m]
        logits = self._head.logits(state)
        if not traits.warm:
            return self._head.pick(logits, rows, self._state.drafts, depth)
        tokens = self._head.choose(logits, None, rows, positions + 2 + depth, traits)
        self._state.drafts[rows, depth] = tokens
        return tokens

    def _newest(
        self,
        verified: Verified,
        state: torch.Tensor,  # [n, hidden]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [m, hidden], [m], [m]
        """Where chains begin: states, rows and positions of the rows' newest entries, others being nobody's."""
        rows, positions = verified.rows, verified.inputs.positions
        if verified.queries > 1:  # a row has one at most
            wanted = verified.newest(self._scratch_row)
            state, rows, positions = state[wanted], rows[wanted], positions[wanted]
        return state, rows, torch.minimum(positions, self._last_position[rows])

    def _tables(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [m, blocks] int32
        """The rows' blocks up to the one that they stand in, which are theirs; the next is the chain's own."""
        own = self._state.num_blocks + self._places[: len(rows)]
        is_next = self._columns == (positions // self._block_size + 1)[:, None]
        return torch.where(is_next, own[:, None].int(), self._state.block_tables[rows])

    def _slots(self, tables: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:  # [m]
        blocks = tables.gather(1, (at // self._block_size)[:, None])[:, 0].long()
        return torch.where(rows == self._scratch_row, -1, blocks * self._block_size + at % self._block_size)

    def _behind(self, tables: torch.Tensor, at: torch.Tensor) -> AttentionBatch:
        """One query each, over all before and itself."""
        each = self._places[: len(at) + 1].int()
        return replace(single_queries(self._state, each[:-1], (at + 1).int(), each), block_tables=tables)

    def ended(self, request: Request) -> None:
        pass

    def forget(self, salt: str | None = None) -> None:
        pass
