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
    """Of chains of drafts that begin all over the answers, and of those that would be verified one after the other."""

    starts: int
    held: list[float]  # by depth: how often a draft held if all before it did
    lengths: list[float]  # by number of drafts: tokens of a step, the one that is sampled anyway included
    per_step: float  # tokens of a step with all drafts, if answers are made in such steps: more begin where few hold

    def line(self) -> str:
        held = " ".join(f"{one:5.1%}" for one in self.held)
        lengths = " ".join(f"{one:.2f}" for one in self.lengths)
        return f"held by depth {held}; tokens {lengths}; tokens per step {self.per_step:.2f}"


def evaluate(head: DraftHead, decoder: Decoder, states: States, depths: int) -> dict[str, Acceptance]:
    """Greedy drafts for greedy answers and for answers sampled at temperature 1; drafts that are sampled with the
    noise of the answer ("coupled") for the latter, too. What the texts have nothing of is left out."""
    found = {}
    for name, temperature, coupled in (("greedy", 0.0, False), ("sampled", 1.0, False), ("coupled", 1.0, True)):
        starts = _starts(states, temperature, depths)
        if len(starts):
            found[name] = acceptance(head, decoder, states, starts, depths, coupled)
    return found


@torch.inference_mode()
def acceptance(
    head: DraftHead,
    decoder: Decoder,
    states: States,
    starts: torch.Tensor,  # [n], ascending: entries after whose tokens is drafted
    depths: int,
    coupled: bool = False,
) -> Acceptance:
    held = torch.zeros(len(starts), dtype=torch.int64, device=starts.device)
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
            held[first : first + rows] += alive
    survived = [len(starts), *(int((held >= depth).sum()) for depth in range(1, depths + 1))]
    shares = [after / max(1.0, before) for before, after in pairwise(survived)]
    lengths = [1 + sum(survived[1 : depth + 1]) / len(starts) for depth in range(1, depths + 1)]
    per_step = _per_step(starts.tolist(), held.tolist())
    return Acceptance(len(starts), [round(one, 4) for one in shares], [round(one, 3) for one in lengths], per_step)


def _per_step(starts: list[int], held: list[int]) -> float:
    """Tokens of a step that begins behind the one before it, in answer after answer."""
    steps = tokens = 0
    place, last = 0, -1  # the entry that the next step begins at, and the one that was looked at
    for start, count in zip(starts, held, strict=True):
        if start >= place or start != last + 1:
            steps, tokens, place = steps + 1, tokens + 1 + count, start + 1 + count
        last = start
    return round(tokens / max(1, steps), 3)


def _starts(states: States, temperature: float, depths: int) -> torch.Tensor:  # [n]
    """Entries of answers at this temperature behind which there are as many more as there are drafts."""
    last = max(0, len(states) - depths)
    fits = states.spans[:last] == states.spans[depths:]
    fits &= states.is_answer[:last] & (states.temperatures[:last] == temperature)
    return fits.nonzero()[:MOST_STARTS, 0]  # texts are in no order
