"""How far a draft head gets on texts that it has not seen: drafts that hold, by depth, and tokens per step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from tokenmill.draft.attention import attend_anywhere
from tokenmill.draft.states import States, embeddings
from tokenmill.model.decoder import Decoder
from tokenmill.model.draft_head import DraftHead
from tokenmill.ops.noise import TOKEN_OFFSET, gumbel, key, mix

MOST_STARTS = 100_000
ROWS, ATTENDING_ROWS = 2048, 512  # that are drafted for together


@dataclass(frozen=True)
class Acceptance:
    """Of chains of drafts that begin all over the answers."""

    starts: int
    held: list[float]  # by depth: how often a draft held if all before it did
    lengths: list[float]  # by number of drafts: tokens per step, the one that is sampled anyway included

    def line(self) -> str:
        held = " ".join(f"{one:5.1%}" for one in self.held)
        return f"held by depth {held}; tokens per step {' '.join(f'{one:.2f}' for one in self.lengths)}"


def evaluate(head: DraftHead, decoder: Decoder, states: States, depths: int, seed: int = 0) -> dict[str, Acceptance]:
    """Greedy drafts for greedy answers and for answers sampled at temperature 1; drafts that are sampled with the
    noise of the answer ("coupled") for the latter, too. What the texts have nothing of is left out."""
    found = {}
    for name, temperature, coupled in (("greedy", 0.0, False), ("sampled", 1.0, False), ("coupled", 1.0, True)):
        starts = _starts(states, temperature, depths, seed)
        if len(starts):
            found[name] = acceptance(head, decoder, states, starts, depths, coupled)
    return found


@torch.inference_mode()
def acceptance(
    head: DraftHead,
    decoder: Decoder,
    states: States,
    starts: torch.Tensor,  # [n]: entries after whose tokens is drafted
    depths: int,
    coupled: bool = False,
) -> Acceptance:
    counts = torch.zeros(depths, device=states.hidden.device)
    hashed = mix(head.ids.long() + TOKEN_OFFSET)
    rows = ROWS if head.kv_layer is None else ATTENDING_ROWS
    for first in range(0, len(starts), rows):
        at = starts[first : first + rows]
        attend = None if head.kv_layer is None else attend_anywhere(decoder, head.kv_layer, states, at)
        state = head.enter(states.hidden[at].float())
        alive = torch.ones(len(at), dtype=torch.bool, device=at.device)
        for depth in range(1, depths + 1):
            embedding = embeddings(decoder, states.tokens[at + depth - 1]).float()
            state = head.step(state, embedding, attend if depth == 1 else None)
            logits = head.logits(state)
            if coupled:
                bits = mix(key(states.seeds[at + depth], states.positions[at + depth])[:, None] ^ hashed)
                logits = logits / states.temperatures[at + depth][:, None] + gumbel(bits)
            alive &= head.ids[logits.argmax(-1)] == states.tokens[at + depth]
            counts[depth - 1] += alive.sum()
    survived = [len(starts), *counts.tolist()]
    held = [after / max(1.0, before) for before, after in pairwise(survived)]
    lengths = [1 + sum(survived[1 : depth + 1]) / len(starts) for depth in range(1, depths + 1)]
    return Acceptance(len(starts), [round(one, 4) for one in held], [round(one, 3) for one in lengths])


def _starts(states: States, temperature: float, depths: int, seed: int) -> torch.Tensor:  # [n]
    """Entries of answers at this temperature behind which there are as many more as there are drafts."""
    last = max(0, len(states) - depths)
    fits = states.spans[:last] == states.spans[depths:]
    fits &= states.is_answer[:last] & (states.temperatures[:last] == temperature)
    starts = fits.nonzero()[:, 0]
    if len(starts) > MOST_STARTS:
        order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))
        starts = starts[order[:MOST_STARTS].to(starts.device)]
    return starts
