"""Experts of ranks that have tokens of their own: these go to where their experts are, and what they add comes back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.model.experts import LocalExperts
from tokenmill.model.spec import DecoderSpec
from tokenmill.parallel.communicator import Communicator


class ExpertExchange:
    """Ranks with other tokens, and other numbers of them, call it once for every mixture that they pass, alike.

    A token goes once to each rank that has experts of it, with its shares, and what these experts add to it comes back.
    Hot experts are everybody's own, and their tokens stay. Ranks that share heads have the same tokens: each sends some
    of them, and the sum over these ranks, which follows in any case, joins the answers. On a CPU; the host waits to
    hear how many tokens there are.
    """

    def __init__(self, spec: DecoderSpec, ranks: Communicator, device: torch.device) -> None:
        assert spec.moe is not None and spec.part is not None
        self._ranks, self._local = ranks, LocalExperts(spec, device, in_turns=False)
        self._turn, self._turns = spec.part.rank, spec.part.ranks
        each = spec.moe.experts // ranks.size
        owner = torch.arange(spec.moe.experts) // each
        owner[list(spec.part.hot_experts)] = ranks.rank
        self._owner = owner.to(device)  # [experts]: the rank that computes it for this one

    def compute(
        self,
        op: Callable[..., torch.Tensor],  # `moe`
        x: torch.Tensor,  # [tokens, hidden]
        share: torch.Tensor,  # [tokens, top_k]
        experts: torch.Tensor,  # [tokens, top_k], of all ranks
        gate_up: torch.Tensor,  # [places, 2 * intermediate, hidden]
        down: torch.Tensor,  # [places, hidden, intermediate]
        activation: str,
    ) -> torch.Tensor:  # [tokens, hidden]
        mine = torch.arange(len(x), device=x.device) % self._turns == self._turn
        owner = torch.where((share != 0) & mine[:, None], self._owner[experts.long()], -1)  # [tokens, top_k]
        goes = (owner[None] == torch.arange(self._ranks.size, device=x.device)[:, None, None]).any(
            -1
        )  # [ranks, tokens]
        most = int(self._ranks.all_gather(goes.sum(-1)).max())
        rank, token = goes.nonzero(as_tuple=True)
        place = goes.cumsum(-1)[rank, token] - 1  # among the tokens that go to that rank
        shares = torch.where(owner[token] == rank[:, None], share[token], 0)  # of the experts that are there

        def sent(values: torch.Tensor) -> torch.Tensor:  # [those that go, ...] -> [ranks, most, ...], received
            box = values.new_zeros(self._ranks.size, most, *values.shape[1:])
            box[rank, place] = values
            return self._ranks.all_to_all(box)

        came, their_share, their_experts = sent(x[token]), sent(shares), sent(experts[token].long())
        flat = (came.flatten(0, 1), their_share.flatten(0, 1), their_experts.flatten(0, 1))
        added = self._local.compute(op, *flat, gate_up, down, activation)
        back = self._ranks.all_to_all(added.view_as(came))
        return torch.zeros_like(x).index_add_(0, token, back[rank, place])
