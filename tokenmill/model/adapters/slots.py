"""AdapterSlots: room for the factors of so many adapters on the device, allocated once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.model.adapters.peft import AdapterWeights, Base
from tokenmill.quant.schemes.adapters import NO_ADAPTER, LowRankUpdates

_FEW_AND_MANY = (1, 512)  # tokens


class AdapterSlots:
    """Whoever writes into a slot sees to it that no launched step is yet to read what was there before: steps and
    writes are launched in the same order that a device does them in.
    """

    def __init__(self, base: Base, slots: int, device: torch.device, op: Callable[..., torch.Tensor]) -> None:
        self.count, self._rank = slots, base.max_rank
        self._ranks: dict[str, torch.Tensor] = {}
        self.updates: dict[str, LowRankUpdates] = {}
        for linear, sections in base.sections.items():
            ends, columns = tuple(one.last for one in sections), base.columns[linear]
            down = torch.zeros(slots, len(ends) * self._rank, columns, dtype=base.dtype, device=device)
            up = torch.zeros(slots, self._rank, ends[-1], dtype=base.dtype, device=device)
            ranks = torch.zeros(slots, dtype=torch.int64, device=device)
            self.updates[linear] = LowRankUpdates(down, up, ranks, ends, op)

    @torch.inference_mode()
    def try_out(self) -> None:
        """Launch what steps will launch, for rows without adapters: compiled now, no request waits for that later."""
        shapes = {(one.down.shape[2], one.ends): one for one in self.updates.values()}
        for (columns, ends), one in shapes.items():
            for tokens in _FEW_AND_MANY:
                x, out = one.down.new_zeros(tokens, columns), one.down.new_zeros(tokens, ends[-1])
                one.add(out, x, torch.full((tokens,), NO_ADAPTER, device=x.device))

    @torch.inference_mode()
    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter in the place of whatever was there."""
        ranks = dict.fromkeys(self.updates, 0)
        for one in weights.factors:
            linear, rank = one.section.linear, one.down.shape[0]
            ranks[linear] = max(ranks[linear], rank)
        for linear, updates in self.updates.items():
            used = ranks[linear]
            updates.ranks[slot : slot + 1].fill_(used)
            for section in range(len(updates.ends)):  # what is not written below adds nothing, whatever is in `up`
                updates.down[slot, section * self._rank : section * self._rank + used].zero_()
        for one in weights.factors:
            updates, at, rank = self.updates[one.section.linear], one.section, one.down.shape[0]
            first = at.number * self._rank
            updates.down[slot, first : first + rank].copy_(one.down, non_blocking=True)
            updates.up[slot, :rank, at.first : at.last].copy_(one.up, non_blocking=True)
