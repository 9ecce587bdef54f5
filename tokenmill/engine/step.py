"""Step: what runs next, as plain data. StepResult: what came back. Runner: whoever executes steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tokenmill.kv.moves import Move, Placement
from tokenmill.kv.pruning import Compaction
from tokenmill.sampling.records import TokenLogprobs

if TYPE_CHECKING:
    from tokenmill.engine.request import Request
    from tokenmill.params import SamplingParams

# Keys and values beyond the range of a narrow cache show in the logits, too.
NOT_FINITE = "the model's logits were not finite; try dtype float32 (on CPUs kv_cache_dtype, too), or check the weights"


# What a prompt's hidden states are made one vector by: of unit length, from their sum or from the last of them
POOLINGS = ("mean", "last")


DRAFTED = 4  # tokens that a device drafts for a row, at most
FANOUT = 4  # nodes of every depth of the trees that it drafts
NODES = FANOUT * DRAFTED
ON_DEVICE = -1  # stands for a draft that only the device knows: its own, at the row's own position
ON_TREE = -2  # the same, of one that drafted a tree, too: a step may verify that in place of the chain (`Step.tree`)


@dataclass(slots=True)
class Admission:
    """A request takes a row: everything the runner keeps for the row's life."""

    row: int
    tokens: list[int]  # every token known so far (prompt, and output if it was preempted or forked)
    prompt_len: int
    params: SamplingParams
    seed: int  # noise is a function of (seed, position), so it survives preemption and batching
    stop_ids: list[int]  # forbidden while fewer than params.min_tokens tokens are out
    num_computed: int = 0  # leading tokens whose keys and values are there already (prefix cache, fork)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows of a step whose block tables begin with the same blocks: a runner may read these once for all of them."""

    tokens: int  # a multiple of the block size; no member computes a position among them
    members: tuple[int, ...]  # indices into the step's lists; singles only


@dataclass(slots=True)
class Step:
    """One forward pass over some tokens of some rows. Parallel lists, one entry per scheduled row.

    Rows that decode one token come first (`num_singles` of them), so kernels can split decodes from chunks; rows that
    verify drafts follow. A chunk of a prompt may be one token, too.
    Within a step every layer writes all keys and values before any attention reads them, so a row may
    share blocks that another row of the same step fills.
    """

    number: int
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the first token computed
    counts: list[int] = field(default_factory=list)  # tokens computed, draft tokens included
    samples: list[int] = field(default_factory=list)  # trailing positions sampled: 0, 1, or 1 + verified drafts
    num_singles: int = 0
    admissions: list[Admission] = field(default_factory=list)
    blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (row, first index, block ids)
    moves: list[Move] = field(default_factory=list)  # blocks that are copied first (copy-on-write)
    placements: list[Placement] = field(default_factory=list)  # modules that are copied into rows, then
    compactions: list[Compaction] = field(default_factory=list)  # what survives of old segments, moved next
    pruned: dict[int, int] = field(default_factory=dict)  # row -> tokens of it that have no slot any more
    # row -> proposed tokens for the positions from start + 1 on, of which as many as the row samples beyond one are
    # verified in this step: those that stand at the device's own positions
    drafts: dict[int, list[int]] = field(default_factory=dict)
    # row -> by how much its start may be larger: the drafts of a launched step, whose fate only the device knows
    slack: dict[int, int] = field(default_factory=dict)
    drafting: bool = False  # the device drafts at the end of the step, for the next one: ON_DEVICE among its drafts
    # The device may verify trees and drafts new ones: behind its own start every row with drafts has blocks for NODES
    # more tokens, and no more than DRAFTED drafts. A runner that knows no trees verifies chains, as in other steps.
    tree: bool = False
    chosen: list[tuple[int, int, int]] = field(default_factory=list)  # beams: (row, position, token) the host chose
    told: list[tuple[int, int, int]] = field(default_factory=list)  # stages: the same of what the last one sampled
    prompt_logprobs: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> (width, prompt length)
    pooling: dict[int, tuple[str, int]] = field(default_factory=dict)  # row -> (one of POOLINGS, prompt length)
    # row -> tokens that its grammar allows, one bit each: next, then behind each of its drafts
    masks: dict[int, list[bytes]] = field(default_factory=dict)
    adapters: list[int] = field(default_factory=list)  # slots of the rows' adapters, -1 without; []: no row has one
    in_float32: list[int] = field(default_factory=list)  # indices of rows computed in that, whatever the model's dtype
    shared: SharedPrefix | None = None  # changes the cost of the step, never its result
    # Data-parallel groups of ranks: the step of each, with rows and blocks of its own; None: it has nothing to do.
    # Everything else of such a step but its number is empty.
    parts: tuple[Step | None, ...] = ()
    requests: list[Request] = field(default_factory=list)  # the scheduler's own; never sent to a rank

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states are read that nothing is sampled from."""
        return bool(self.prompt_logprobs or self.pooling)


def parts_of(step: Step) -> Iterable[Step]:
    """The steps that one is made of: itself, or what each data-parallel group does in it."""
    return [part for part in step.parts if part is not None] if step.parts else (step,)


def num_decodes(step: Step) -> int:
    """Rows that decode, with drafts or without: they come first."""
    return step.num_singles + sum(1 for samples in step.samples if samples > 1)


def only_decodes(step: Step) -> bool:
    """Whether every row of the step decodes, with drafts or without, and nothing else happens."""
    return num_decodes(step) == len(step.rows) and not (
        step.admissions or step.moves or step.chosen or step.wants_hidden or 0 in step.samples
    )


def is_speculative(step: Step) -> bool:
    """Whether a row verifies drafts, or is as long as only the device knows."""
    return bool(step.drafts or step.slack or step.drafting)


@dataclass(slots=True)
class StepResult:
    """What a step produced, in the step's row order."""

    tokens: list[list[int]]  # the tokens that held; [] where nothing was sampled; [-1] where logits were not finite
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row index in step -> one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row index -> one per position
    pooled: dict[int, list[float]] = field(default_factory=dict)  # row index -> vector, when all of its prompt was read
    parts: tuple[StepResult | None, ...] = ()  # of a step that has parts: of each; everything else is empty then


@dataclass(frozen=True, slots=True)
class Loss:
    """What a runner could not keep when it was reset: all rows, keys and values are gone."""

    weight: float = 1  # how much of a failure it was of the requests that were in void steps, as far as is known


class Pending(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises StepFailed; then every later launched step is void as well."""
        ...


class Runner(Protocol):
    """Executes steps in the order launched. One rank or a group of ranks behind the same verbs."""

    def launch(self, step: Step) -> Pending:
        """Start the step without waiting for the device. May raise StepFailed."""
        ...

    def reset(self) -> Loss | None:
        """Drop whatever is in flight after a failure. Rows of the void steps are admitted anew; the others stay, unless
        there was a loss: then all are."""
        ...

    def close(self) -> None: ...
