"""One row's sampling settings in the forms that the sampler keeps them in: words for the device, flags for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.ops.types import ANY_TOKEN, RowEdits
from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.engine.step import Admission

Words = npt.NDArray[np.int64]

# What the device knows about a row: 32-bit words, in this order, one table row per word. An even number of them, so
# that they travel as 64-bit ones.
WORDS = [
    ("temperature", "<f4"),
    ("top_k", "<i4"),
    ("top_p", "<f4"),
    ("min_p", "<f4"),
    ("repetition", "<f4"),
    ("presence", "<f4"),
    ("frequency", "<f4"),
    ("prompt_len", "<i4"),
    ("stops_from", "<i4"),  # the first position at which stop tokens are allowed
    ("width", "<i4"),  # best tokens per position; -1: no log-probabilities
]
UPLOAD = np.dtype([("row", "<i8"), ("seed", "<i8"), ("edits", "<i8"), *WORDS])

# What a row that belongs to nobody has: padding of recorded steps is sampled as well, greedily.
NEUTRAL = {"repetition": 1.0, "width": -1}

_LAST_POSITION = (1 << 31) - 1
_EDIT_COUNTS = 4  # words in front of a row's edits

# Flags of a row, so that one lookup tells which work a batch needs at all.
WARM = 1  # not greedy
FILTERED = 2  # top_k, top_p or min_p
SHAPED = 4  # penalties, bias, bad words, min_tokens or a grammar
LOGPROBS = 8


class Traits(NamedTuple):
    """Which work the sampling of a batch needs. What is recorded for a batch serves others with the same traits."""

    warm: bool = False  # not all are greedy
    filtered: bool = False  # some have top_k, top_p or min_p
    shaped: bool = False  # some have penalties, edits or a grammar
    best: int | None = None  # best tokens per position that there is room for; None: nobody asked for log-probabilities


def flags_of(params: SamplingParams, width: int) -> int:
    flags = LOGPROBS if width >= 0 else 0
    if not params.greedy and not params.beam_width:
        flags |= WARM
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            flags |= FILTERED
    if params.structured is not None or params.shapes_logits:
        flags |= SHAPED
    return flags


def width_of(params: SamplingParams, num_stop_ids: int, vocab_size: int) -> int:
    """How many best tokens a row needs per position: -1 is no log-probabilities, 0 only the chosen token's."""
    width = -1 if params.logprobs is None else params.logprobs
    if params.best_of is not None and params.best_of > params.n:
        width = max(width, 0)
    if params.beam_width:
        # A beam may lose a candidate to every stop id and must still offer enough that go on.
        width = max(width, 2 * params.beam_width + num_stop_ids)
    return min(width, vocab_size)


def device_settings(admission: Admission, vocab_size: int, width: int, edits: int) -> tuple[float, ...]:
    """The fields of UPLOAD. `edits`: at which word of the upload the row's edits begin; 0: it has none."""
    params = admission.params
    return (
        admission.row,
        _signed(admission.seed),
        edits,
        0.0 if params.beam_width else params.temperature,
        min(params.top_k, vocab_size),
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        admission.prompt_len,
        min(admission.prompt_len + params.min_tokens, _LAST_POSITION),
        width,
    )


def pack_edits(admission: Admission, vocab_size: int) -> Words:
    """A row's edits as `ShapeBatch.edits_at` has them; empty where there are none. Ids outside the vocabulary would be
    out of bounds on the device; they can never be chosen, so they are left out.
    """
    params = admission.params
    if not (params.logit_bias or params.bad_words_ids or params.min_tokens):
        return np.zeros(0, dtype=np.int64)
    bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
    bad_words = [word for word in params.bad_words_ids if word and 0 <= word[-1] < vocab_size]
    longest = max(map(len, bad_words), default=0)
    padded = [[ANY_TOKEN] * (longest - len(word)) + list(word) for word in bad_words]
    stop_ids = [token for token in admission.stop_ids if 0 <= token < vocab_size] if params.min_tokens else []
    counts = [len(bias), len(bad_words), longest, len(stop_ids)]
    if not any(counts):
        return np.zeros(0, dtype=np.int64)
    values = np.array(list(bias.values()), dtype=np.float64).view(np.int64)
    parts = [np.array(part, dtype=np.int64).ravel() for part in (counts, list(bias), padded, stop_ids)]
    return np.concatenate([*parts[:2], values, *parts[2:]])


def cut_edits(
    packed: torch.Tensor,  # [words] int64, on any device
    on_host: Words,  # the same words
) -> RowEdits:
    biases, words, longest, stops = on_host[:_EDIT_COUNTS].tolist()
    parts = torch.split_with_sizes(packed[_EDIT_COUNTS:], [biases, biases, words * longest, stops])
    ids, values, bad_words, stop_ids = parts
    return RowEdits(
        bias_ids=ids if biases else None,
        bias_values=values.view(torch.float64) if biases else None,
        bad_words=bad_words.view(words, longest) if words else None,
        stop_ids=stop_ids if stops else None,
    )


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
