"""Sampler: keeps every row's sampling settings and turns a step's logits into tokens without waiting for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.ops.registry import Ops
from tokenmill.ops.shaping import PENALTY_SCRATCH
from tokenmill.ops.types import LOGPROB_BUCKETS, RowEdits, SampleBatch, ShapeBatch
from tokenmill.sampling.logprobs import Widths
from tokenmill.sampling.settings import (
    FILTERED,
    LOGPROBS,
    NEUTRAL,
    SHAPED,
    UPLOAD,
    WARM,
    WORDS,
    Traits,
    Words,
    cut_edits,
    device_settings,
    flags_of,
    pack_edits,
    width_of,
)

if TYPE_CHECKING:
    from tokenmill.engine.step import Admission
    from tokenmill.sampling.vocab_parts import VocabPart

_WORD_NAMES = [name for name, _ in WORDS]


# Logits up to which a CPU samples with one thread: torch's team of threads takes turns with the native library's then,
# and both wait for the cores. 60 tokens of the default model took 0.32 s at temperature 1 and take 0.24; beside other
# work they took ten times as long as greedy ones.
SMALL = 1 << 20


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch's own work in here is done by this thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Sampled:
    """What a batch of logits became; everything is still on the device."""

    tokens: torch.Tensor  # [n] int64; -1 where the logits held a NaN or no finite value
    logprobs: torch.Tensor | None = None  # [n, words], from the op of that name; it holds the tokens, too
    stride: int = 1  # more: every row has so many, however many it asked for

    def mark_rejected(self) -> None:
        """Drafts that did not hold were replaced by a mark among the tokens: log-probabilities name the tokens, too."""
        if self.logprobs is not None:
            self.logprobs[:, 0] = self.tokens.to(self.logprobs.dtype)

    def first(self, n: int, stride: int = 1) -> Sampled:
        return Sampled(self.tokens[:n], None if self.logprobs is None else self.logprobs[:n], stride)


class Sampler:
    """Owns the settings of the rows, on the host and on the device. Holds nothing that depends on tokens:
    penalties are counted anew from the token table, so preemption, forks and roll-back need no care.
    """

    def __init__(
        self,
        ops: Ops,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str,
        tokens: torch.Tensor,  # [max_rows, max_len] int32: the device token table, written by the runner
        max_verified: int = 0,  # drafts of a step that may have masks of their own
        part: VocabPart | None = None,  # the tokens whose logits this rank has; None: all
    ) -> None:
        self.ops = ops
        self.part = part
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.tokens = tokens
        self._flags = np.zeros(max_rows, dtype=np.uint8)
        self._widths = np.full(max_rows, -1, dtype=np.int32)
        # One row more than there are requests, for padding.
        neutral = np.zeros(max_rows + 1, dtype=WORDS)
        for name, value in NEUTRAL.items():
            neutral[name] = value
        words = torch.from_numpy(neutral.view(np.int32).reshape(max_rows + 1, len(WORDS)))
        self._words = words.t().contiguous().to(self.device)  # [words, max_rows + 1] int32
        self._seeds = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)
        self._edits_at = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)  # addresses
        self._edits: dict[int, RowEdits] = {}  # keeps what these point to
        # [max_rows + 1 + max_verified, 1 + words] int32: whether the row has a mask, and a bit per token; made when
        # first needed. Behind the rows are places for the masks of a step's drafts. An even number of words, so that
        # masks travel as 64-bit ones.
        self._mask_words = (-(-vocab_size // 32) + 2) & ~1
        self._num_masks = max_rows + 1 + max_verified
        self._masks: torch.Tensor | None = None
        self._masked_rows: set[int] = set()
        self._draft_masks: dict[int, int] = {}  # of the newest step: row -> place of the mask behind its first draft
        self._counters: torch.Tensor | None = None

    def admit(self, admissions: list[Admission]) -> None:
        """Remember the settings of rows that begin a life. One copy to the device, whatever the number of rows."""
        if not admissions:
            return
        for admission in admissions:
            if admission.row in self._masked_rows and admission.params.structured is None and self._masks is not None:
                self._masked_rows.remove(admission.row)
                self._masks[admission.row, 0] = 0
        upload = np.zeros(len(admissions), dtype=UPLOAD)
        pieces = [upload.view(np.int64)]
        edits: dict[int, int] = {}  # row -> where its edits are in the upload
        at = pieces[0].size
        for i, admission in enumerate(admissions):
            row, width = admission.row, width_of(admission.params, len(admission.stop_ids), self.vocab_size)
            self._flags[row], self._widths[row] = flags_of(admission.params, width), width
            self._edits.pop(row, None)
            piece = pack_edits(admission, self.vocab_size)
            if piece.size:
                edits[row] = at
                pieces.append(piece)
            upload[i] = device_settings(admission, self.vocab_size, width, edits.get(row, 0))
            at += piece.size
        if any(self._flags[admission.row] & SHAPED for admission in admissions):
            self._make_tables()
        packed = self._to_device(np.concatenate(pieces))
        settings = packed[: pieces[0].size].view(len(admissions), -1)  # [admissions, 3 + words / 2] int64
        rows, edits_at = settings[:, 0], settings[:, 2]
        self._seeds.index_copy_(0, rows, settings[:, 1])
        self._words.index_copy_(1, rows, settings[:, 3:].view(torch.int32).t())
        for (row, begin), piece in zip(edits.items(), pieces[1:], strict=True):
            self._edits[row] = cut_edits(packed[begin : begin + piece.size], piece)
        if edits:
            edits_at = torch.where(edits_at > 0, packed.data_ptr() + packed.element_size() * edits_at, 0)
        self._edits_at.index_copy_(0, rows, edits_at)

    def take_masks(self, masks: dict[int, list[bytes]]) -> None:
        """Remember which tokens these rows may choose from in this step: next, then behind each of their drafts. One
        copy to the device."""
        self._draft_masks.clear()
        if not masks:
            return
        if self._masks is None:
            self._masks = self._new_masks()
        places: list[int] = []
        free = len(self._seeds)
        for row, mine in masks.items():
            behind = len(mine) - 1
            places += [row, *range(free, free + behind)]
            if behind:
                self._draft_masks[row] = free
                free += behind
        count = len(places)
        words = np.zeros(count + count * self._mask_words // 2, dtype=np.int64)  # places, then masks
        words[:count] = places
        table = words[count:].view(np.int32).reshape(count, -1)
        table[:, 0] = 1
        all_masks = (mask for mine in masks.values() for mask in mine)
        for entry, mask in enumerate(all_masks):  # the grammar's vocabulary may be larger or smaller than ours
            bits = np.frombuffer(mask, dtype=np.int32)[: self._mask_words - 1]
            table[entry, 1 : 1 + len(bits)] = bits
        packed = self._to_device(words)
        if self.device.type == "cpu":  # on this thread: the wait for others takes longer than the work
            self._masks.numpy()[places] = table
        else:
            self._masks.index_copy_(0, packed[:count], packed[count:].view(torch.int32).view(count, -1))
        self._masked_rows.update(masks)

    def mask_rows(self, rows: Words, numbers: Words) -> Words:
        """Where in the table the masks of entries are. `numbers`: 0 for a row's newest token, or which draft it is."""
        if not self._draft_masks:
            return rows
        found = rows.copy()
        for row, first in self._draft_masks.items():
            drafts = (rows == row) & (numbers > 0)
            found[drafts] = first + numbers[drafts] - 1
        return found

    def traits(self, rows: Sequence[int]) -> Traits:
        """Which work the sampling of these rows needs, one entry per position that is sampled."""
        entries = np.asarray(rows, dtype=np.int64)
        flags = int(np.bitwise_or.reduce(self._flags[entries], initial=0))
        best = self._room(int(self._widths[entries].max())) if flags & LOGPROBS else None
        return Traits(bool(flags & WARM), bool(flags & FILTERED), bool(flags & SHAPED), best)

    def noise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [n] float32, [n] int64
        """Temperatures and seeds of these rows [n] int64: with the same noise others may guess what is sampled."""
        heat = self._words[_WORD_NAMES.index("temperature")].view(torch.float32)
        return heat.index_select(0, rows), self._seeds.index_select(0, rows)

    def widths(self, rows: Sequence[int]) -> Widths:
        """How many best tokens each of these rows asked for; -1: it wants no log-probabilities."""
        return self._widths[np.asarray(rows, dtype=np.int64)]

    @staticmethod
    def recordable(traits: Traits) -> bool:
        return traits.best is None or traits.best in LOGPROB_BUCKETS

    @staticmethod
    def variants() -> list[Traits]:
        """All traits that batches may be recorded with."""
        return [
            Traits(warm, filtered, shaped, best)
            for warm, filtered in ((False, False), (True, False), (True, True))
            for shaped in (False, True)
            for best in (None, *LOGPROB_BUCKETS)
        ]

    def rehearse(
        self,
        logits: torch.Tensor,  # [n, vocab]
        traits: Traits,
    ) -> Sampled:
        """Sample for rows that belong to nobody: what runs is what runs for any batch of as many with these traits."""
        if traits.shaped:
            self._make_tables()
        rows = torch.full((logits.shape[0],), len(self._seeds) - 1, dtype=torch.int64, device=self.device)
        return self.sample(logits, rows, torch.zeros_like(rows), traits)

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab], or this rank's part; overwritten where they are shaped and float32 or 64
        rows: torch.Tensor,  # [n] int64: entry i chooses the token at positions[i] of rows[i]
        positions: torch.Tensor,  # [n] int64
        traits: Traits,  # of the rows
        mask_rows: torch.Tensor | None = None,  # [n] int64, see the method of that name; None: no draft has a mask
    ) -> Sampled:
        """Choose tokens from device state alone, so that the work can be recorded and replayed."""
        if self.device.type == "cpu" and logits.numel() <= SMALL:
            with one_thread():
                return self._sample(logits, rows, positions, traits, mask_rows)
        return self._sample(logits, rows, positions, traits, mask_rows)

    def _sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        traits: Traits,
        mask_rows: torch.Tensor | None,
    ) -> Sampled:
        settings = self._words.index_select(1, rows)  # [words, n]
        words = dict(zip(_WORD_NAMES, settings.unbind(), strict=True))
        numbers = dict(zip(_WORD_NAMES, settings.view(torch.float32).unbind(), strict=True))
        part = self.part
        plain = not (traits.filtered or traits.shaped or traits.best is not None)
        if part is not None and self.device.type != "cpu" and not plain:  # the host may not look who needs what
            logits, part = part.whole(logits), None
        raw = logits
        if traits.shaped:
            if logits.element_size() < 4:  # shaped ones need more precision than a model's own dtype has
                logits = logits.float()
            elif traits.best is not None:
                logits = logits.clone()
            shape_batch = ShapeBatch(
                rows=rows,
                positions=positions,
                tokens=self.tokens,
                edits=self._edits,
                edits_at=self._edits_at.index_select(0, rows),
                masks=self._masks,
                mask_rows=rows if mask_rows is None else mask_rows,
                counters=self._counters,
                first=0 if part is None else part.tokens.start,
                **{name: words[name] for name in ("prompt_len", "stops_from")},
                **{name: numbers[name] for name in ("repetition", "presence", "frequency")},
            )
            self.ops.shape(logits, shape_batch)
        batch = SampleBatch(
            temperature=numbers["temperature"],
            top_k=words["top_k"],
            top_p=numbers["top_p"],
            min_p=numbers["min_p"],
            seed=self._seeds.index_select(0, rows),
            position=positions,
            all_greedy=not traits.warm,
            any_filter=traits.filtered,
        )
        tokens = self.ops.sample(logits, batch) if part is None else part.sample(logits, batch)
        if traits.best is None:
            return Sampled(tokens)
        logprobs = self.ops.logprobs if part is None else part.logprobs
        return Sampled(tokens, logprobs(raw, tokens, words["width"], traits.best))

    def prompt_logprobs(
        self,
        logits: torch.Tensor,  # [m, vocab], or this rank's part: what the model says about each next token of a prompt
        targets: torch.Tensor,  # [m]: the tokens that stand there
        width: int,  # best tokens per position
    ) -> torch.Tensor:  # [m, words], as `Sampled.logprobs`
        widths = torch.full(targets.shape, width, dtype=torch.int32, device=logits.device)
        logprobs = self.ops.logprobs if self.part is None else self.part.logprobs
        return logprobs(logits, targets.long(), widths, self._room(width))

    def _room(self, width: int) -> int:
        """Few different numbers where each is a kernel of its own; beyond those it is torch that computes."""
        if self.device.type == "cpu" or width > LOGPROB_BUCKETS[-1]:
            return min(width, self.vocab_size)
        return next(bucket for bucket in LOGPROB_BUCKETS if width <= bucket)

    def _make_tables(self) -> None:
        """What shaping on a GPU needs, once and for all: a recording serves batches with any of these settings, and is
        made of tables that were there before it."""
        if self.device.type == "cuda" and self._counters is None:
            slots = min(len(self._seeds), max(1, PENALTY_SCRATCH // (4 * self.vocab_size)))
            self._counters = torch.zeros(slots, self.vocab_size, dtype=torch.int32, device=self.device)
            self._masks = self._new_masks() if self._masks is None else self._masks

    def _new_masks(self) -> torch.Tensor:
        return torch.zeros(self._num_masks, self._mask_words, dtype=torch.int32, device=self.device)

    def _to_device(self, words: Words) -> torch.Tensor:
        tensor = torch.from_numpy(words)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
