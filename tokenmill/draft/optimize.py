"""The training loop of a draft head: several drafts deep, towards drafts that hold."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.draft.attention import attend_in_windows
from tokenmill.draft.loss import draft_loss, parts
from tokenmill.draft.states import States, embeddings, head_rows
from tokenmill.errors import ConfigError
from tokenmill.model.decoder import Decoder
from tokenmill.model.draft_head import DraftHead, Target, rms_norm

WINDOW = 1024  # tokens that follow each other in a batch, from the beginning of a text on: most texts are shorter
EVEN = 64  # entries of a batch are a multiple of this, where there are so many: products of odd sizes are slower
WARM_UP = 0.02  # of the training, in which the learning rate rises
DRAWS = 1000  # of windows, before it is clear that none will do
COUNTED_EVERY, WAITED_EVERY = 100, 25  # steps: the host may run ahead of a GPU, but knows the time
SAID_EVERY, KEPT_EVERY = 10.0, 60.0  # seconds
STEP = 4  # entries before one: how many of them a step went over tells how often a step begins at it

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Schedule:
    """How a head is trained."""

    minutes: float = 8.0
    steps: int | None = None  # instead of minutes
    depths: int = 5
    batch: int = 16384  # entries
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    depth_weight: float = 0.9  # of each depth, compared with the one before it
    chain_weight: float = 0.7  # share of a depth's weight that is lost where the drafts before it do not hold
    soft_weight: float = 1.0  # of cross-entropy with the target's distribution
    match_weight: float = 0.0  # of the logarithm of the chance that a draft holds
    question_weight: float = 0.3  # of entries in questions, compared with those in answers
    seed: int = 0


@dataclass(frozen=True)
class Sizes:
    state: int
    inner: int = 1024


def new_head(
    decoder: Decoder,
    states: States,
    ids: torch.Tensor,  # [draft vocabulary] int32
    sizes: Sizes,
    seed: int,
    kv_layer: int | None = None,  # that it attends to, of which `states` has keys and values
) -> DraftHead:
    """It begins as one that predicts, from the hidden state itself, what the target predicts there."""
    hidden, state, inner = decoder.spec.hidden, sizes.state, sizes.inner
    device = states.hidden.device
    random = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * gain / math.sqrt(columns)).to(device)

    def mean_size(x: torch.Tensor) -> float:
        return float(x[:4096].float().square().mean().sqrt()) or 1.0

    # States are of size 1; a token's embedding, which is far smaller in many models, is brought to the same.
    mix_norm = torch.ones(state + hidden, device=device)
    mix_norm[state:] /= mean_size(embeddings(decoder, states.tokens[:4096]))
    same = state == hidden
    attention: dict[str, Any] = {}
    if kv_layer is not None:
        assert states.keys is not None and states.values is not None
        width = decoder.spec.heads * decoder.spec.head_dim
        attention = {
            "kv_layer": kv_layer,
            "attention_norm": torch.ones(state, device=device),
            "q_weight": drawn(width, state, gain=1 / mean_size(states.keys)),  # no key is far ahead of the others
            "o_weight": drawn(state, width, gain=0.1 / mean_size(states.values)),
        }
    return DraftHead(
        enter_norm=torch.ones(hidden, device=device),
        enter_weight=torch.eye(hidden, device=device) if same else drawn(state, hidden),
        mix_norm=mix_norm,
        gate_up_weight=drawn(2 * inner, state + hidden),
        down_weight=drawn(state, inner, gain=0.1),
        norm2=torch.ones(state, device=device),
        gate_up2_weight=drawn(2 * inner, state),
        down2_weight=drawn(state, inner, gain=0.1),
        out_norm=torch.full((state,), mean_size(states.hidden) if same else 1.0, device=device),
        head_weight=head_rows(decoder, ids) if same else drawn(len(ids), state),
        ids=ids.to(device),
        target=Target.of(decoder.spec, decoder.weights.final_norm),
        **attention,
    )


def optimize(
    head: DraftHead,
    decoder: Decoder,
    states: States,
    schedule: Schedule,
    tell: Tell,
    keep: Callable[[DraftHead], None] = lambda head: None,  # called now and then with what there is
) -> tuple[DraftHead, Mapping[str, Any]]:
    """The trained head, and what happened. Ctrl-C ends the training, not the program: the head is as far as it came."""
    device = states.hidden.device
    on_gpu = device.type == "cuda"
    head = head.map(lambda one: one.clone().requires_grad_())
    params = list(head.tensors().values())
    groups = [
        {"params": [one for one in params if one.dim() > 1], "weight_decay": schedule.weight_decay},
        {"params": [one for one in params if one.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=on_gpu)
    batches = Batches(head, decoder, states, schedule)
    began, step, done, recent = time.monotonic(), 0, 0.0, torch.zeros((), device=device)
    losses: list[float] = []
    said = kept = began
    try:
        while done < 1.0:
            for group in adam.param_groups:
                group["lr"] = schedule.learning_rate * _rate(done)
            loss = batches.loss(head)
            adam.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            adam.step()
            recent += loss.detach()
            step += 1
            if on_gpu and step % WAITED_EVERY == 0:
                torch.cuda.synchronize(device)
            passed = time.monotonic() - began
            done = step / schedule.steps if schedule.steps else passed / (60 * schedule.minutes)
            if step % COUNTED_EVERY == 0 or done >= 1.0:
                losses.append(float(recent) / (step - COUNTED_EVERY * len(losses)))
                recent.zero_()
                now, speed = time.monotonic(), batches.seen / passed
                if now - said > SAID_EVERY or done >= 1.0:
                    tell(f"step {step} ({done:.0%}): loss {losses[-1]:.4f}, {speed:.0f} tokens/s")
                    said = now
                if now - kept > KEPT_EVERY:
                    keep(head)
                    kept = now
    except KeyboardInterrupt:
        tell(f"interrupted after {step} steps: the head is kept as it is")
    seconds = time.monotonic() - began
    return head.map(lambda one: one.detach()), {
        "steps": step,
        "seconds": round(seconds, 1),
        "passes": round(batches.seen / max(1, len(states)), 2),
        "losses": [round(one, 4) for one in losses[:: max(1, len(losses) // 20)]],
    }


def _rate(done: float) -> float:
    """Of the learning rate: up, and down along a cosine."""
    if done < WARM_UP:
        return 0.05 + 0.95 * done / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


class Batches:
    """Random windows of the texts that the target wrote, and the loss of a head on them."""

    def __init__(self, head: DraftHead, decoder: Decoder, states: States, schedule: Schedule) -> None:
        device = states.hidden.device
        self._decoder, self._states, self._schedule = decoder, states, schedule
        if len(states) <= schedule.depths:
            raise ValueError(f"{len(states)} entries are too few for {schedule.depths} drafts in a row")
        tokens = len(states.begins)
        self._width = min(WINDOW, tokens, max(EVEN, schedule.batch))
        starts = (states.begins == torch.arange(tokens, device=device)).nonzero()[:, 0]
        self._starts = starts[starts <= tokens - self._width]  # of texts that a window may begin with
        self._windows = math.ceil(schedule.batch * tokens / (self._width * len(states)))
        self._random = torch.Generator(device).manual_seed(schedule.seed)
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._rows = head_rows(decoder, head.ids).to(self._dtype)  # [draft vocabulary, hidden]
        self._weights = torch.where(states.is_answer, 1.0, schedule.question_weight)  # [entries]
        self._places = torch.full((decoder.spec.vocab_size,), -1, device=device)  # of tokens in the draft vocabulary
        self._places[head.ids.long()] = torch.arange(len(head.ids), device=device)
        self._held = torch.ones(len(states), device=device)  # drafts behind each entry, when it was seen last
        self.seen = 0  # entries that chains of drafts began at

    def loss(self, head: DraftHead) -> torch.Tensor:  # []
        states, schedule = self._states, self._schedule
        first, entries, window = self._drawn()
        total = len(entries)
        count = min(schedule.batch, total)
        count = count // EVEN * EVEN or count
        self.seen += count
        place = torch.arange(count + schedule.depths, device=entries.device)
        at = entries[place.clamp_max(total - 1)]  # [count + depths]
        # Drafts are for the same question or answer, in the same window: one may have been drawn twice
        spans = window[place.clamp_max(total - 1)] * (states.spans[-1] + 1) + states.spans[at]
        spans = torch.where(place < total, spans, -1)
        hidden, weights = states.hidden[at], self._weights[at]
        embedded = embeddings(self._decoder, states.tokens[at])
        targets = self._targets(hidden, states.log_z[at])
        attend = None
        if head.kv_layer is not None:
            drafted = at[:count], window[:count]
            attend = attend_in_windows(self._decoder, head.kv_layer, states, *drafted, first, self._width)
        loss = torch.zeros((), device=at.device)
        scale = torch.zeros((), device=at.device)
        begun = self._begun(at[:count])
        alive, held = torch.ones(count, device=at.device), torch.zeros(count, device=at.device)
        places, warm = self._places[states.tokens[at]], states.temperatures[at] > 0
        with torch.autocast(at.device.type, dtype=torch.bfloat16, enabled=at.is_cuda):
            state = head.enter(hidden[:count].float()).float()  # and so it stays, whatever products are made in
            for depth in range(1, schedule.depths + 1):
                ahead = slice(depth, depth + count)
                state = head.step(state, embedded[depth - 1 : depth - 1 + count], attend if depth == 1 else None)
                inside = spans[:count] == spans[ahead]
                share = weights[ahead] * inside * begun * schedule.depth_weight ** (depth - 1)
                share = share * (1 - schedule.chain_weight * (1 - alive))
                read = rms_norm(state, head.out_norm).to(self._dtype)
                found, holds = draft_loss(
                    read,
                    head.head_weight,
                    targets[ahead],
                    places[ahead],
                    warm[ahead],
                    share,
                    schedule.soft_weight,
                    schedule.match_weight,
                )
                loss, scale = loss + found, scale + share.sum()
                alive = alive * holds * inside
                held += alive
        self._held[at[:count]] = held
        return loss / scale.clamp_min(1e-3)

    def _begun(self, at: torch.Tensor) -> torch.Tensor:  # [n] -> [n]
        """About how often a step begins at these entries: rarely behind drafts that held."""
        before = torch.stack([self._held[(at - back).clamp_min(0)] for back in range(1, STEP + 1)])
        return 1 / (1 + before.mean(0))

    def _drawn(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first tokens of some windows; the entries in them, of one window after the other; and whose they are."""
        device = self._starts.device
        for _ in range(DRAWS):
            drawn = torch.randint(len(self._starts), (self._windows,), generator=self._random, device=device)
            first = self._starts[drawn]
            begin, end = (torch.searchsorted(self._states.read, one) for one in (first, first + self._width))
            counts = end - begin
            window = torch.arange(len(first), device=device).repeat_interleave(counts)
            if len(window):  # windows of nothing but others' text have no entries
                break
        else:
            tried = f"{DRAWS * self._windows} windows of {self._width} tokens"
            raise ConfigError(f"none of {tried} has a token that the model wrote; raise --batch")
        place = torch.arange(len(window), device=device) - (counts.cumsum(0) - counts)[window]
        return first, begin[window] + place, window

    @torch.no_grad()
    def _targets(self, hidden: torch.Tensor, log_z: torch.Tensor) -> torch.Tensor:  # [n, draft vocabulary]
        """The target's probabilities of the tokens that can be drafted; they sum up to 1 or less."""
        cap = self._decoder.spec.logit_softcap
        found = torch.empty(*log_z.shape, len(self._rows), dtype=self._dtype, device=hidden.device)
        for part in parts(found):
            logits = (hidden[part].to(self._dtype) @ self._rows.T).float()
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            found[part] = (logits - log_z[part][..., None]).exp()
        return found
