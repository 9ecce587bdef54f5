"""Sampler: keeps every row's sampling settings and turns a step's logits into tokens without waiting for the device."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.ops.registry import Ops
from tokenmill.ops.types import SampleBatch
from tokenmill.params import SamplingParams
from tokenmill.sampling.logprobs import LogprobTensors, measure
from tokenmill.sampling.shaping import (
    ANY_TOKEN,
    RowEdits,
    add_bias,
    allow_only,
    allow_only_on_host,
    forbid,
    forbid_words,
    penalize,
)

if TYPE_CHECKING:
    from tokenmill.engine.step import Admission

# What the device knows about a row: 32-bit words, in this order, one table row per word.
_WORDS = [
    ("temperature", "<f4"),
    ("top_k", "<i4"),
    ("top_p", "<f4"),
    ("min_p", "<f4"),
    ("repetition", "<f4"),
    ("presence", "<f4"),
    ("frequency", "<f4"),
    ("prompt_len", "<i4"),
]
_UPLOAD = np.dtype([("row", "<i8"), ("seed", "<i8"), *_WORDS])
_HOST = np.dtype([("traits", "u1"), ("prompt_len", "<i4"), ("min_tokens", "<i8"), ("width", "<i4")])
_PENALTY_SCRATCH = 256 << 20  # bytes; more penalized rows than fit are done in slices

# Traits of a row, so that one lookup tells which work a batch needs at all.
_WARM = 1  # not greedy
_FILTERED = 2  # top_k, top_p or min_p
_PENALIZED = 4
_EDITED = 8  # bias, bad words or min_tokens
_LOGPROBS = 16
_MASKED = 32  # a grammar says which tokens may come

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampled:
    """What a batch of logits became; everything is still on the device."""

    tokens: torch.Tensor  # [n] int64; -1 where the logits held a NaN or no finite value
    logprobs: LogprobTensors | None  # for the entries whose rows asked; None where none did


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
    ) -> None:
        self.ops = ops
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.tokens = tokens
        self._host = np.zeros(max_rows, dtype=_HOST)
        # One row more than there are requests: padding of recorded steps is sampled as well, greedily.
        self._words = torch.zeros(len(_WORDS), max_rows + 1, dtype=torch.int32, device=self.device)
        self._seeds = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)
        self._edits: dict[int, RowEdits] = {}
        # [max_rows + 1, 1 + words] int32: whether the row has a mask, and a bit per token; made when first needed.
        # An even number of words, so that masks travel as 64-bit ones.
        self._mask_words = (-(-vocab_size // 32) + 2) & ~1
        self._masks: torch.Tensor | None = None
        self._masked_rows: set[int] = set()

    def admit(self, admissions: list[Admission]) -> None:
        """Remember the settings of rows that begin a life. One copy to the device, whatever the number of rows."""
        if not admissions:
            return
        for admission in admissions:
            if admission.row in self._masked_rows and admission.params.structured is None and self._masks is not None:
                self._masked_rows.remove(admission.row)
                self._masks[admission.row, 0] = 0
        upload = np.zeros(len(admissions), dtype=_UPLOAD)
        edits = []
        for i, admission in enumerate(admissions):
            upload[i] = self._device_settings(admission)
            self._host[admission.row] = self._host_settings(admission)
            edits.append(_edits_of(admission, self.vocab_size))
        pieces = [upload.view(np.int64)]
        pieces += [piece.ravel() for row_edits in edits for piece in row_edits.values()]
        packed = self._to_device(np.concatenate(pieces))
        settings = packed[: len(pieces[0])].view(len(admissions), -1)  # [admissions, words / 2 + 2] int64
        rows = settings[:, 0]
        self._seeds.index_copy_(0, rows, settings[:, 1])
        self._words.index_copy_(1, rows, settings[:, 2:].view(torch.int32).t())
        at = len(pieces[0])
        for admission, row_edits in zip(admissions, edits, strict=True):
            views = {}
            for name, piece in row_edits.items():
                views[name] = packed[at : at + piece.size].view(piece.shape)
                at += piece.size
            if "bias_values" in views:
                views["bias_values"] = views["bias_values"].view(torch.float64)
            self._edits[admission.row] = RowEdits(**views)

    def take_masks(self, masks: dict[int, bytes]) -> None:
        """Remember which tokens these rows may choose from in this step. One copy to the device."""
        if not masks:
            return
        if self._masks is None:
            self._masks = torch.zeros(len(self._seeds), self._mask_words, dtype=torch.int32, device=self.device)
        table = np.zeros((len(masks), self._mask_words), dtype=np.int32)
        table[:, 0] = 1
        for entry, mask in enumerate(masks.values()):  # the grammar's vocabulary may be larger or smaller than ours
            words = np.frombuffer(mask, dtype=np.int32)[: self._mask_words - 1]
            table[entry, 1 : 1 + len(words)] = words
        rows = np.array(list(masks), dtype=np.int64)
        packed = self._to_device(np.concatenate([rows, table.reshape(-1).view(np.int64)]))
        content = packed[len(rows) :].view(torch.int32).view(len(rows), -1)
        self._masks.index_copy_(0, packed[: len(rows)], content)
        self._masked_rows.update(masks)

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] float32 or float64; overwritten where penalties or edits apply
        rows: list[int],  # entry i chooses the token at positions[i] of rows[i]; a row may come several times
        positions: list[int],
        rows_device: torch.Tensor,  # [n], the same numbers
        positions_device: torch.Tensor,  # [n]
    ) -> Sampled:
        host = self._host[rows]
        traits = int(np.bitwise_or.reduce(host["traits"], initial=0))
        penalized = np.flatnonzero(host["traits"] & _PENALIZED) if traits & _PENALIZED else _NONE
        asked = np.flatnonzero(host["traits"] & _LOGPROBS) if traits & _LOGPROBS else _NONE
        if penalized.size or asked.size:
            indices = self._to_device(np.concatenate([penalized, asked]))
        words = self._words.index_select(1, rows_device)  # [words, n]
        if asked.size:
            everything = asked.size == len(rows) and not traits & (_PENALIZED | _EDITED | _MASKED)
            raw = logits if everything else logits.index_select(0, indices[penalized.size :])
        if penalized.size:
            self._penalize(
                logits, penalized, indices[: penalized.size], positions, words, rows_device, positions_device
            )
        if traits & _EDITED:
            self._edit(logits, host, rows, positions)
        if traits & _MASKED:
            self._allow_only(logits, rows_device)
        tokens = self.ops.sample(logits, self._batch(words, rows_device, positions_device, traits))
        if not asked.size:
            return Sampled(tokens, None)
        mine = tokens.index_select(0, indices[penalized.size :])
        return Sampled(tokens, measure(raw, mine, asked.tolist(), host["width"][asked].tolist()))

    def plain_traits(self, rows: list[int]) -> int | None:
        """How these rows are sampled, for `sample_plain`; None if any of them needs more than filters and noise."""
        traits = int(np.bitwise_or.reduce(self._host["traits"][rows], initial=0))
        return None if traits & (_PENALIZED | _EDITED | _LOGPROBS) else traits

    def sample_plain(
        self,
        logits: torch.Tensor,  # [n, vocab]
        rows: torch.Tensor,  # [n]
        positions: torch.Tensor,  # [n]
        traits: int,  # from `plain_traits`
    ) -> torch.Tensor:  # [n] int64
        """Choose tokens from device state alone, so that the work can be recorded and replayed."""
        words = self._words.index_select(1, rows)
        if traits & _MASKED:
            self._allow_only(logits, rows)
        return self.ops.sample(logits, self._batch(words, rows, positions, traits))

    def _allow_only(
        self,
        logits: torch.Tensor,  # [n, vocab], overwritten
        rows: torch.Tensor,  # [n]
    ) -> None:
        assert self._masks is not None, "a row has a grammar, but the step brought no mask for it"
        if self.device.type == "cpu":
            allow_only_on_host(logits, self._masks, rows)
        elif _has_triton():
            from tokenmill.ops.triton.mask import allow_only as allow_only_in_triton

            allow_only_in_triton(logits, self._masks, rows)
        else:
            allow_only(logits, self._masks, rows)

    def _batch(
        self, words: torch.Tensor, rows_device: torch.Tensor, positions_device: torch.Tensor, traits: int
    ) -> SampleBatch:
        numbers = words.view(torch.float32)
        return SampleBatch(
            temperature=numbers[0],
            top_k=words[1],
            top_p=numbers[2],
            min_p=numbers[3],
            seed=self._seeds.index_select(0, rows_device),
            position=positions_device.long(),
            all_greedy=not traits & _WARM,
            any_filter=bool(traits & _FILTERED),
        )

    def _penalize(
        self,
        logits: torch.Tensor,
        penalized: Words,  # [k]: the entries, on the host
        entries: torch.Tensor,  # [k]: and on the device
        positions: list[int],
        words: torch.Tensor,
        rows_device: torch.Tensor,
        positions_device: torch.Tensor,
    ) -> None:
        longest = max(positions[entry] for entry in penalized)
        known = self.tokens[:, :longest]
        per_row = 4 * logits.element_size() * logits.shape[1] + 24 * longest  # counts; the row's tokens as indices
        size = max(1, _PENALTY_SCRATCH // per_row)
        for part in torch.split(entries, size):
            mine = words.index_select(1, part)
            repetition, presence, frequency = mine[4:7].view(torch.float32)
            shaped = logits.index_select(0, part)
            penalize(
                shaped,
                known.index_select(0, rows_device.index_select(0, part)),
                positions_device.index_select(0, part),
                mine[7],
                repetition,
                presence,
                frequency,
            )
            logits.index_copy_(0, part, shaped)

    def _edit(self, logits: torch.Tensor, host: npt.NDArray[np.void], rows: list[int], positions: list[int]) -> None:
        for entry in np.flatnonzero(host["traits"] & _EDITED).tolist():
            row, position = rows[entry], positions[entry]
            edits = self._edits[row]
            if edits.bias_ids is not None and edits.bias_values is not None:
                add_bias(logits[entry], edits.bias_ids, edits.bias_values)
            if edits.bad_words is not None:
                forbid_words(logits[entry], edits.bad_words, self.tokens[row, :position])
            if edits.stop_ids is not None and position - host["prompt_len"][entry] < host["min_tokens"][entry]:
                forbid(logits[entry], edits.stop_ids)

    def _device_settings(self, admission: Admission) -> tuple[float, ...]:
        params = admission.params
        return (
            admission.row,
            _signed(admission.seed),
            0.0 if params.beam_width else params.temperature,
            min(params.top_k, self.vocab_size),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            admission.prompt_len,
        )

    def _host_settings(self, admission: Admission) -> tuple[int, ...]:
        params = admission.params
        width = _logprob_width(params, len(admission.stop_ids))
        traits = _traits(params) | (_LOGPROBS if width is not None else 0)
        return traits, admission.prompt_len, params.min_tokens, min(width or 0, self.vocab_size)

    def _to_device(self, words: Words) -> torch.Tensor:
        tensor = torch.from_numpy(words)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_NONE: Words = np.zeros(0, dtype=np.int64)


def _traits(params: SamplingParams) -> int:
    traits = 0
    if not params.greedy and not params.beam_width:
        traits |= _WARM
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            traits |= _FILTERED
    if params.structured is not None:
        traits |= _MASKED
    if params.penalized:
        traits |= _PENALIZED
    if params.logit_bias or params.bad_words_ids or params.min_tokens:
        traits |= _EDITED
    return traits


def _logprob_width(params: SamplingParams, num_stop_ids: int) -> int | None:
    """How many best tokens a row needs per position: None is no log-probabilities, 0 only the chosen token's."""
    width = params.logprobs
    if params.best_of is not None and params.best_of > params.n:
        width = width or 0
    if params.beam_width:
        # A beam may lose a candidate to every stop id and must still offer enough that go on.
        width = max(width or 0, 2 * params.beam_width + num_stop_ids)
    return width


def _edits_of(admission: Admission, vocab_size: int) -> dict[str, Words]:
    """The fields of RowEdits that the row needs. Ids outside the vocabulary would be out of bounds on the device;
    they can never be chosen, so they are left out.
    """
    params = admission.params
    found: dict[str, Words] = {}
    bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
    if bias:
        found["bias_ids"] = np.array(list(bias), dtype=np.int64)
        found["bias_values"] = np.array(list(bias.values()), dtype=np.float64).view(np.int64)
    bad_words = [word for word in params.bad_words_ids if word and 0 <= word[-1] < vocab_size]
    if bad_words:
        longest = max(map(len, bad_words))
        found["bad_words"] = np.array([[ANY_TOKEN] * (longest - len(word)) + list(word) for word in bad_words])
    stop_ids = [token for token in admission.stop_ids if 0 <= token < vocab_size]
    if params.min_tokens and stop_ids:
        found["stop_ids"] = np.array(stop_ids, dtype=np.int64)
    assert found.keys() <= {field.name for field in fields(RowEdits)}
    return found


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
