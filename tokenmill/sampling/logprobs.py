"""Log-probabilities on the host: plain numbers from the words that the op of that name left in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.ops.types import LOGPROB_WORDS
from tokenmill.sampling.records import TokenLogprobs

Widths = npt.NDArray[np.int32]


def unpack(
    words: npt.NDArray[Any],  # [n, LOGPROB_WORDS + 2 * k] int32 or int64; floats by their bits
    widths: Widths,  # [n]: how many best tokens to tell of each; -1: nothing
) -> list[TokenLogprobs | None]:
    """One per entry; None for those that did not ask."""
    most = max(int(widths.max(initial=0)), 0)
    k = (words.shape[1] - LOGPROB_WORDS) // 2
    floats = words.view(np.float32 if words.dtype == np.int32 else np.float64)
    columns = (
        widths,
        words[:, 0],
        floats[:, 2],
        words[:, 1],
        words[:, LOGPROB_WORDS : LOGPROB_WORDS + most],
        floats[:, LOGPROB_WORDS + k : LOGPROB_WORDS + k + most],
    )
    return [
        TokenLogprobs(token, logprob, rank, list(zip(ids[:width], values[:width]))) if width >= 0 else None
        for width, token, logprob, rank, ids, values in zip(*(column.tolist() for column in columns), strict=True)
    ]
