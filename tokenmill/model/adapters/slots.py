"""AdapterSlots: room for the factors of so many adapters on the device, allocated once; of a rank, for its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from tokenmill.model.adapters.peft import AdapterWeights, Base
from tokenmill.model.shard import held
from tokenmill.model.spec import DecoderSpec
from tokenmill.quant.schemes.adapters import NO_ADAPTER, LowRankUpdates

_FEW_AND_MANY = (1, 512)  # tokens


@dataclass(frozen=True)
class SlotShape:
    """What is kept of the factors of one linear layer. What ranks compute of `up @ (down @ x)` adds up to all of it:
    a layer whose rows are divided has the rows of `up` divided, one whose columns are has those of `down`.
    """

    columns: range
    rows: tuple[tuple[range, ...], ...]  # of the whole layer, by section, in the order in which they are here

    @property
    def ends(self) -> tuple[int, ...]:
        """Of the sections."""
        return tuple(accumulate(sum(map(len, spans)) for spans in self.rows))

    @property
    def elements(self) -> int:
        """For every unit of rank."""
        return len(self.rows) * len(self.columns) + self.ends[-1]


def slot_shapes(base: Base, part: DecoderSpec) -> dict[str, SlotShape]:
    """By the name in the model of each linear layer that is in this part of it."""
    kept = held(part)
    found = {}
    for name, dims in kept.items():
        linear = name_in_model(part, name)
        if linear not in base.sections:
            continue
        sections = base.sections[linear]
        rows = dims.get(0, (range(sections[-1].last),))
        (columns,) = dims.get(1, (range(base.columns[linear]),))
        found[linear] = SlotShape(columns, tuple(_shared(rows, range(one.first, one.last)) for one in sections))
    return found


def slot_bytes(base: Base, part: DecoderSpec) -> int:
    """Of an adapter of the largest rank."""
    return sum(one.elements for one in slot_shapes(base, part).values()) * base.max_rank * base.dtype.itemsize


def name_in_model(part: DecoderSpec, name: str) -> str:
    return name if part.stage is None else part.stage.name_in_model(name)


class AdapterSlots:
    """Whoever writes into a slot sees to it that no launched step is yet to read what was there before: steps and
    writes are launched in the same order that a device does them in.
    """

    def __init__(
        self, base: Base, part: DecoderSpec, slots: int, device: torch.device, op: Callable[..., torch.Tensor]
    ) -> None:
        self.count, self._rank = slots, base.max_rank
        self._shapes = slot_shapes(base, part)
        self._by_name: dict[str, LowRankUpdates] = {}  # in the model
        for linear, shape in self._shapes.items():
            columns, ends = len(shape.columns), shape.ends
            down = torch.zeros(slots, len(ends) * self._rank, columns, dtype=base.dtype, device=device)
            up = torch.zeros(slots, self._rank, ends[-1], dtype=base.dtype, device=device)
            ranks = torch.zeros(slots, dtype=torch.int64, device=device)
            self._by_name[linear] = LowRankUpdates(down, up, ranks, ends, op)
        names = {name: name_in_model(part, name) for name in part.parameters()}
        self.updates = {name: self._by_name[whole] for name, whole in names.items() if whole in self._by_name}

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
        """Put an adapter, of the whole model, in the place of whatever was there."""
        ranks = dict.fromkeys(self._by_name, 0)
        mine = [one for one in weights.factors if one.section.linear in ranks]
        for one in mine:
            linear, rank = one.section.linear, one.down.shape[0]
            ranks[linear] = max(ranks[linear], rank)
        for linear, updates in self._by_name.items():
            used = ranks[linear]
            updates.ranks[slot : slot + 1].fill_(used)
            for section in range(len(updates.ends)):  # what is not written below adds nothing, whatever is in `up`
                updates.down[slot, section * self._rank : section * self._rank + used].zero_()
        for one in mine:
            at, rank = one.section, one.down.shape[0]
            updates, shape = self._by_name[at.linear], self._shapes[at.linear]
            first, columns = at.number * self._rank, slice(shape.columns.start, shape.columns.stop)
            updates.down[slot, first : first + rank].copy_(one.down[:, columns], non_blocking=True)
            row = 0 if at.number == 0 else shape.ends[at.number - 1]
            for span in shape.rows[at.number]:
                some = one.up[:, span.start - at.first : span.stop - at.first]
                updates.up[slot, :rank, row : row + len(span)].copy_(some, non_blocking=True)
                row += len(span)


def _shared(spans: tuple[range, ...], section: range) -> tuple[range, ...]:
    """What of the spans is in the section."""
    both = (range(max(one.start, section.start), min(one.stop, section.stop)) for one in spans)
    return tuple(one for one in both if one)
