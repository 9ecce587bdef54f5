"""What a target model computes while it writes texts: hidden states, and a layer's keys and values; once, and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tokenmill.draft.data import Texts
from tokenmill.engine.build import Built
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.model.decoder import Decoder, LayerKV, TokenBatch
from tokenmill.ops.kv_forms import gather
from tokenmill.ops.types import AttentionBatch

STEP_TOKENS = 16384  # at most, of texts that go through the decoder together
LOGITS_BYTES = 1 << 30  # of full logits that exist at a time

Progress = Callable[[int, int], None]  # done, in all


@dataclass(frozen=True)
class States:
    """One entry for each written token: what it was sampled from. Entries of a question or an answer follow each other.

    The token of entry i is the one that `hidden[i]` gave; the next entry of the same span has read it.
    """

    hidden: torch.Tensor  # [entries, hidden] bfloat16 (float32 on a CPU): normed, as the head reads it
    tokens: torch.Tensor  # [entries] int64
    spans: torch.Tensor  # [entries] int64: which question or answer
    log_z: torch.Tensor  # [entries] float32: logarithm of the sum over all exponentiated logits
    is_answer: torch.Tensor  # [entries] bool
    temperatures: torch.Tensor  # [entries] float32
    seeds: torch.Tensor  # [entries] int64
    positions: torch.Tensor  # [entries] int64: of the token in its text, the other half of the noise's key
    read: torch.Tensor  # [entries] int64, ascending: which token of all texts `hidden` stands behind
    begins: torch.Tensor  # [tokens of all texts] int64: where their text begins
    keys: torch.Tensor | None = None  # [tokens of all texts, kv_heads, dim], rotated: what one layer has cached
    values: torch.Tensor | None = None  # [tokens of all texts, kv_heads, dim]

    def __len__(self) -> int:
        return len(self.tokens)


def runner_of(built: Built) -> TorchRunner:
    runner = built.engine.runner
    assert isinstance(runner, TorchRunner)
    return runner


def states_of(
    built: Built,
    texts: Texts,
    kv_layer: int | None = None,  # whose keys and values are kept; None: nobody's
    tell: Progress | None = None,
) -> States:
    """Uses the engine's decoder and KV memory: no request may run, and none may use what is cached."""
    runner = runner_of(built)
    decoder, device = runner.decoder, runner.device
    built.engine.reset_prefix_cache()
    states, places = _empty(texts, decoder, device, kv_layer is not None)
    starts, lengths = texts.starts.tolist(), texts.starts.diff().tolist()
    order = sorted(range(len(texts)), key=lengths.__getitem__)
    most = min(STEP_TOKENS, built.settings.max_step_tokens)
    block_size = runner.state.block_size
    blocks = runner.state.kv[0].k.shape[0]
    done = 0
    with torch.inference_mode(), runner.on_device():
        for group in _groups(order, lengths, most, blocks * block_size, block_size):
            spans = [(starts[one], starts[one + 1]) for one in group]
            at = torch.cat([places[first:last] for first, last in spans])
            ids = torch.cat([texts.tokens[first:last] for first, last in spans]).to(device).long()
            batch = packed([lengths[one] for one in group], ids, block_size, runner.state.max_blocks)
            wanted = (at >= 0).nonzero()[:, 0].to(device)
            found = decoder.forward(batch, runner.state.kv, wanted=wanted)
            states.hidden[at[at >= 0].to(device)] = found.to(states.hidden.dtype)
            if kv_layer is not None and states.keys is not None and states.values is not None:
                tokens = torch.cat([torch.arange(first, last) for first, last in spans]).to(device)
                states.keys[tokens], states.values[tokens] = _cached(runner.state.kv[kv_layer], batch.slots, states)
            done += len(ids)
            if tell is not None:
                tell(done, len(texts.tokens))
        for part, logits in logits_parts(decoder, states.hidden):
            states.log_z[part] = logits.logsumexp(-1)
    return states


def _cached(kv: LayerKV, slots: torch.Tensor, states: States) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at these slots, [n, kv_heads, dim] each."""
    block, offset = slots // kv.k.shape[1], slots % kv.k.shape[1]
    scales = (None, None) if kv.scales is None else (kv.scales.k[block, offset], kv.scales.v[block, offset])
    every = torch.arange(len(slots), device=slots.device)
    dtype = states.hidden.dtype
    return gather(kv.k[block, offset], scales[0], every, dtype), gather(kv.v[block, offset], scales[1], every, dtype)


def logits_parts(decoder: Decoder, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The target's logits of these hidden states, as many rows at a time as memory is meant for."""
    size = max(1, LOGITS_BYTES // (4 * decoder.spec.vocab_size))
    for first in range(0, len(hidden), size):
        part = slice(first, first + size)
        yield part, decoder.logits(hidden[part].to(decoder.weights.dtype))


@torch.no_grad()
def head_rows(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:  # [n] -> [n, hidden] float32
    """Rows of the target's lm_head, whatever form it is stored in: what it makes of the unit vectors."""
    unit = torch.eye(decoder.spec.hidden, dtype=decoder.weights.dtype, device=decoder.weights.device)
    rows = replace(decoder.weights.lm_head, bias=None)(unit)  # [hidden, vocab]
    return rows.T[ids.long().to(rows.device)].float().contiguous()


@torch.no_grad()
def embeddings(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:  # [n] -> [n, hidden]
    """As the decoder reads them, scale included; a tensor that may be trained on."""
    return decoder.embed(ids.flatten()).take()[0].clone().view(*ids.shape, -1)


def packed(
    lengths: list[int],
    ids: torch.Tensor,  # [sum of lengths]
    block_size: int,
    max_blocks: int,  # width of the engine's block tables, for which its kernels are compiled
) -> TokenBatch:
    """Whole texts of different lengths, each from its own beginning, in blocks of its own."""
    device = ids.device
    counts = torch.tensor(lengths)
    ends = counts.cumsum(0)
    needed = -(-counts // block_size)
    first_block = needed.cumsum(0) - needed
    tables = first_block[:, None] + torch.arange(max_blocks)
    tables = torch.where(torch.arange(max_blocks) < needed[:, None], tables, 0)
    rows = torch.arange(len(lengths)).repeat_interleave(counts)
    positions = torch.arange(len(ids)) - (ends - counts)[rows]
    slots = (first_block[rows] + positions // block_size) * block_size + positions % block_size
    attention = AttentionBatch(
        rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        q_start=torch.cat([torch.zeros(1, dtype=torch.long), ends]).int().to(device),
        context=counts.int().to(device),
        block_tables=tables.int().to(device),
        num_singles=0,
        max_query=max(lengths),
        max_context=max(lengths),
        host_rows=list(range(len(lengths))),
        host_counts=lengths,
        host_context=lengths,
    )
    return TokenBatch(ids, positions.to(device), slots.to(device), attention)


def _groups(order: list[int], lengths: list[int], tokens: int, slots: int, block_size: int) -> Iterator[list[int]]:
    """Texts that go through the decoder together: so many tokens at most, and their blocks fit."""
    group: list[int] = []
    used = taken = 0
    for one in order:
        room = -(-lengths[one] // block_size) * block_size
        if group and (used + lengths[one] > tokens or taken + room > slots):
            yield group
            group, used, taken = [], 0, 0
        group.append(one)
        used, taken = used + lengths[one], taken + room
    if group:
        yield group


def _empty(texts: Texts, decoder: Decoder, device: torch.device, with_cache: bool) -> tuple[States, torch.Tensor]:
    """Entries without their hidden states; and of each token of the texts, which entry it is read for (or -1)."""
    lengths = texts.starts.diff()
    text = torch.arange(len(texts)).repeat_interleave(lengths)
    place = torch.arange(len(texts.tokens)) - texts.starts[text] + 1  # in its text, of the token that comes next

    def inside(spans: torch.Tensor) -> torch.Tensor:
        return (place >= spans[text, 0]) & (place < spans[text, 1])

    is_answer = inside(texts.answers)
    written = is_answer | inside(texts.questions)
    at = torch.where(written, written.cumsum(0) - 1, -1)
    which = written.nonzero()[:, 0]  # [entries]: the token that is read
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    owner = text[which]
    cache = [
        torch.empty(len(text), decoder.spec.kv_heads, decoder.spec.head_dim, dtype=dtype, device=device)
        if with_cache
        else None
        for _ in "kv"
    ]
    return States(
        hidden=torch.empty(len(which), decoder.spec.hidden, dtype=dtype, device=device),
        tokens=texts.tokens[which + 1].long().to(device),
        spans=(2 * owner + is_answer[which]).to(device),
        log_z=torch.empty(len(which), device=device),
        is_answer=is_answer[which].to(device),
        temperatures=texts.temperatures[owner].to(device),
        seeds=texts.seeds[owner].to(device),
        positions=place[which].to(device),
        read=which.to(device),
        begins=texts.starts[text].to(device),
        keys=cache[0],
        values=cache[1],
    ), at
