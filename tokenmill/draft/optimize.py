"""The training loop of a draft head: several drafts deep, towards the target's own distributions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.draft.attention import attend_in_windows
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
PROBABILITY_BYTES = 256 << 20  # of float32 probabilities that exist at a time, times a few

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
    depth_weight: float = 0.8  # of each depth, compared with the one before it
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
        with torch.autocast(at.device.type, dtype=torch.bfloat16, enabled=at.is_cuda):
            state = head.enter(hidden[:count].float()).float()  # and so it stays, whatever products are made in
            for depth in range(1, schedule.depths + 1):
                ahead = slice(depth, depth + count)
                state = head.step(state, embedded[depth - 1 : depth - 1 + count], attend if depth == 1 else None)
                share = weights[ahead] * (spans[:count] == spans[ahead])
                share = share * schedule.depth_weight ** (depth - 1)
                read = rms_norm(state, head.out_norm).to(self._dtype)
                loss = loss + soft_cross_entropy(read, head.head_weight, targets[ahead], share)
                scale = scale + share.sum()
        return loss / scale.clamp_min(1.0)

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
        for part in _parts(found):
            logits = (hidden[part].to(self._dtype) @ self._rows.T).float()
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            found[part] = (logits - log_z[part][..., None]).exp()
        return found


def _parts(probabilities: torch.Tensor) -> list[slice]:  # [n, vocabulary]
    """Of the rows: few enough that float32 copies of them fit."""
    rows, vocabulary = probabilities.shape
    size = max(1, PROBABILITY_BYTES // (4 * vocabulary))
    return [slice(first, first + size) for first in range(0, rows, size)]


def soft_cross_entropy(
    x: torch.Tensor,  # [n, state]
    weight: torch.Tensor,  # [vocabulary, state]
    target: torch.Tensor,  # [n, vocabulary]: probabilities
    share: torch.Tensor,  # [n]
) -> torch.Tensor:  # []: sum over rows of share * cross-entropy of softmax(x @ weight.T) with the target
    """Computed with its gradient at once, part by part: logits of all rows and depths would not fit."""
    found: torch.Tensor = _SoftCrossEntropy.apply(x, weight, target, share)  # type: ignore[no-untyped-call]
    return found


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        narrow = weight.to(x.dtype)
        total = torch.zeros((), device=x.device)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            for part in _parts(target):
                wanted, scale = target[part].float(), share[part].float()[..., None]
                mass = wanted.sum(-1, keepdim=True)
                logits = (x[part] @ narrow.T).float()
                log_z = logits.logsumexp(-1, keepdim=True)
                total += (scale * (mass * log_z - (wanted * logits).sum(-1, keepdim=True))).sum()
                grad = (logits.sub_(log_z).exp_().mul_(mass).sub_(wanted)).mul_(scale).to(x.dtype)
                grad_x[part] = grad @ narrow
                grad_weight += grad.T @ x[part]
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grads[0].to(grad_x.dtype), grad_weight * grads[0], None, None
