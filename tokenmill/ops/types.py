"""Arguments shared by the ops: the batch an attention op sees, the mask it applies, sampling inputs, rows of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see, beyond causality, and what is done to its scores."""

    window: int | None = None  # a query at position p sees keys with p - window < position <= p
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


CAUSAL = Mask()


@dataclass
class AttentionBatch:
    """The rows of one step, as attention sees them. Device tensors; the host copies avoid any sync."""

    rows: torch.Tensor  # [n] int32: index into block_tables
    q_start: torch.Tensor  # [n + 1] int32: where each row's queries begin in the token dimension
    context: torch.Tensor  # [n] int32: keys of the row once this step's are written (start + count)
    block_tables: torch.Tensor  # [max_rows, max_blocks] int32
    num_singles: int  # the first num_singles rows have exactly one query each
    max_query: int  # largest count
    max_context: int  # largest context
    host_rows: list[int]  # the same numbers as the tensors, on the host
    host_counts: list[int]
    host_context: list[int]
    tree: torch.Tensor | None = None  # [tokens, max_query] bool: which of its row's new tokens a query sees
    # Singles whose block tables begin with the same blocks, so that these may be read once for all of them. It changes
    # nothing about the answer, and an implementation may ignore it. Positions beyond the last member hold -1.
    shared_members: torch.Tensor | None = None  # [at most n] int32: which of the n rows
    shared_tokens: torch.Tensor | None = None  # [n] int32: length of the common beginning; 0: the row is no member
    # So many singles after each other are one row's, at consecutive positions, or behind its own nobody's: its keys may
    # be read once for all of them. Also this changes no answer, and may be ignored.
    queries: int = 1
    # Where these are the nodes of a tree, root first, each in a place behind the one before, [n] int32: which of the
    # row's nodes each sees, one bit for each; all see what is before the root. Only implementations that declare it
    # (`Implementation.tails`) know it. Nodes of a depth lie together, `fanout` of them: what windows go by.
    tails: torch.Tensor | None = None
    fanout: int = 1
    # Where a recording serves steps of several shapes, [2] int64: how many rows and singles the present one has. The
    # tensors above have room for the largest then. Only the native ops know it.
    counts: torch.Tensor | None = None
    # [tokens, heads, v_dim]: where the result may be written; an implementation may ignore it and return a new tensor.
    out: torch.Tensor | None = None
    cache: dict[str, Any] = field(default_factory=dict)  # what an implementation derives once for all layers


@dataclass
class SampleBatch:
    """Sampling settings of the rows that are sampled in a step. All tensors are [n] on the logits' device."""

    temperature: torch.Tensor  # float32; 0 is greedy
    top_k: torch.Tensor  # int32; 0 is off
    top_p: torch.Tensor  # float32; 1 is off
    min_p: torch.Tensor  # float32; 0 is off
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64: index of the token being chosen, the other half of the noise's key
    all_greedy: bool  # known on the host, so the common case costs one argmax
    any_filter: bool  # whether any row uses top_k, top_p or min_p


LOGPROB_WORDS = 3  # of a row's results before its best tokens: the token, its rank, its log-probability
LOGPROB_BUCKETS = (8, 32)  # best tokens per row that kernels are made for; more are torch's work
ANY_TOKEN = -1  # pads forbidden words in front: any token may stand there


@dataclass(frozen=True)
class RowEdits:
    """The sparse edits of one row, on the device; None where the row has none of that kind."""

    bias_ids: torch.Tensor | None = None  # [b] int64
    bias_values: torch.Tensor | None = None  # [b] float64
    bad_words: torch.Tensor | None = None  # [words, longest] int64, right-aligned, padded with ANY_TOKEN
    stop_ids: torch.Tensor | None = None  # [s] int64: forbidden while the output is shorter than min_tokens


@dataclass
class ShapeBatch:
    """What changes the logits of the rows that are sampled in a step, beyond temperature and filters.

    All tensors are on the logits' device; those of settings are [n], and a row without a setting has a neutral one.
    """

    rows: torch.Tensor  # int64: entry i chooses the token at positions[i] of rows[i]; a row may come several times
    positions: torch.Tensor  # int64
    tokens: torch.Tensor  # [all rows, max_len] int32: only those before the position count
    prompt_len: torch.Tensor  # int32
    repetition: torch.Tensor  # float32, over prompt and output: divides positive logits, multiplies negative ones
    presence: torch.Tensor  # float32, subtracted once from every token of the output
    frequency: torch.Tensor  # float32, subtracted for each time a token stands in the output
    stops_from: torch.Tensor  # int32: from which position on stop tokens are allowed
    edits: dict[int, RowEdits]  # by row: the way of implementations in which the host may look
    # int64: where on the device a row's edits lie, 0 where it has none. They are int64 words: how many biases, words,
    # tokens of the longest word and stop ids there are, then the ids of the biases, their values (float64), the words
    # and the stop ids, as in RowEdits.
    edits_at: torch.Tensor
    masks: torch.Tensor | None  # [places, 1 + words] int32: whether there is a mask; one bit per token, lowest first
    mask_rows: torch.Tensor  # int64: which of the masks is for an entry; `rows`, except where drafts have their own
    counters: torch.Tensor | None  # [slots, vocab] int32, all zero before and after; None on a CPU
    first: int = 0  # the token of the first logit; other than 0 where a rank has a part of them, on a CPU


@dataclass(frozen=True)
class Unnormed:
    """One row that is still to be added to its residual and normed: for a layer that does so where it reads the row."""

    update: torch.Tensor  # [1, in]
    residual: torch.Tensor  # [1, in]
    weight: torch.Tensor  # [in]
    eps: float
    total: torch.Tensor  # [1, in]: where the sum goes


@dataclass(frozen=True)
class QuantizedRows:
    """Activations that are float8 or int8 already, with a scale per row: what a fused norm or activation hands over."""

    values: torch.Tensor  # [..., in] float8 or int8
    scale: torch.Tensor  # [...] float32
    dtype: torch.dtype  # of the model, and so of the product

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def flatten(self, first: int, last: int) -> QuantizedRows:
        """As of a tensor; the last dimension stays."""
        assert (first, last) == (0, -2)
        return QuantizedRows(self.values.flatten(0, -2), self.scale.flatten(), self.dtype)

    def widen(self) -> torch.Tensor:  # [..., in]
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return (self.values.to(wide) * self.scale[..., None]).to(self.dtype)


Rows = torch.Tensor | QuantizedRows | Unnormed  # [..., in]: what a linear layer takes
Storage = dict[str, torch.Tensor]  # of a linear layer's weight, by names that its scheme and its kernels know


@dataclass(frozen=True)
class DecodeTables:
    """What decoding rows read and write between steps; the first dimension of all is that of table rows."""

    tokens: torch.Tensor  # [table rows, width] int32
    block_tables: torch.Tensor  # [table rows, blocks] int32
    lengths: torch.Tensor  # [table rows] int64: tokens that are known, kept by steps that verify drafts
    drafts: torch.Tensor  # [table rows, drafted] int64: what the device drafted
    on_device: int  # stands for one of these among the proposed drafts
    scratch_row: int  # belongs to nobody: padding
    block_size: int


@dataclass(frozen=True)
class DecodeInputs:
    """What a step in which every row decodes computes, one entry per token."""

    ids: torch.Tensor  # [n] int32
    positions: torch.Tensor  # [n] int64
    slots: torch.Tensor  # [n] int64: where key and value go; -1 for padding
    context: torch.Tensor  # [n] int32: keys that are attended to; 0 for padding
    rows: torch.Tensor  # [n] int32
    is_draft: torch.Tensor  # [n] int8: 0 where none was proposed for the position; only set in steps with drafts


@dataclass(frozen=True)
class TreeTables:
    """Trees that the device drafted. Nodes are sorted by depth, as many in each; the first dimension is table rows."""

    tokens: torch.Tensor  # [table rows, nodes] int64
    parents: torch.Tensor  # [table rows, nodes] int64: 0 is the root, the row's newest token; n is the n-th node
    fanout: int  # nodes of a depth


@dataclass(frozen=True)
class TreeInputs:
    """What a step in which rows verify trees computes: 1 + nodes entries of every row, root first."""

    entries: DecodeInputs  # [n]; of those that are nobody's slots are -1 and contexts 0
    parents: torch.Tensor  # [n] int32: number within the row; -1 where there is no node, and of the root
    tails: torch.Tensor  # [n] int32, see `AttentionBatch.tails`


@dataclass(frozen=True)
class KeptPaths:
    """Of every row the path through its tree that held."""

    tokens: torch.Tensor  # [rows * (1 + depths)] int64: what was sampled along it, then `rejected`
    order: torch.Tensor  # [rows * (1 + depths)] int64: of which entries
    nodes: torch.Tensor  # [rows, depths] int64: its nodes; 0 behind its end
    last: torch.Tensor  # [rows] int64: its last entry
    newest: torch.Tensor  # [rows] int64: what was sampled there
    positions: torch.Tensor  # [rows] int64: where that stands


@dataclass(frozen=True)
class TreeNoise:
    """What drafted tokens are ranked with where rows are not greedy: the noise that the target is sampled with."""

    temperature: torch.Tensor  # [rows] float32
    seed: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64: of the rows' newest tokens
