"""Request: one sequence of tokens on its way through the engine, its state, and what it waits for."""

from __future__ import annotations

import enum
import sys
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING

from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.engine.beams import Beams
    from tokenmill.engine.held import HeldSequence
    from tokenmill.sampling.grammar import Constraint
    from tokenmill.sampling.records import TokenLogprobs


class State(enum.Enum):
    WAITING = "waiting"  # in the queue, for room: holds neither row nor blocks
    PARKED = "parked"  # holds nothing either, and is not queued before what it waits for has happened
    RUNNING = "running"  # holds a row and blocks
    FINISHED = "finished"


class Wait(enum.Enum):
    """What a request waits for, besides room, before it may be in a step."""

    GRAMMAR = "grammar"  # is compiled, or it is not known yet which tokens it allows next
    LEADER = "leader"  # a sibling computes the prompt that they share
    ROUND = "round"  # the other beams of its search
    COMMIT = "commit"  # a launched step reads what it would write again
    TRANSFER = "transfer"  # blocks of its text are on their way to the device; the transfer holds them
    ADAPTER = "adapter"  # its adapter is read, or every slot on the device is held by others
    MODULES = "modules"  # parts of its prompt are computed on their own


class Finish(enum.StrEnum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


REALTIME, API, BATCH = 0, 1, 2  # priority classes, first served first


@dataclass
class Metrics:
    """When things happened to a request, in the engine's clock (seconds), and what it was spared."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    cached_tokens: int = 0  # prompt tokens that the prefix cache supplied at first admission
    module_tokens: int = 0  # prompt tokens that were copied from modules, at first admission
    preemptions: int = 0

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.cached_tokens + self.module_tokens

    @property
    def queue_seconds(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps > 0 else None


@dataclass(slots=True, eq=False)
class Module:
    """A part of a prompt that has keys and values of its own, wherever it stands."""

    first: int  # position in the prompt
    end: int
    identities: list[bytes] = field(default_factory=list)  # of its blocks where it stands alone; none: not known yet


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence. `num_computed` chases `num_tokens`; there are no phases.

    Positions [0, num_computed) have keys and values in `blocks`, or will have once the launched steps ran.
    Tokens that a launched step will sample count in `num_tokens` before their values are known. How long a row is may
    be known to the device alone: with drafts in flight both numbers are lower bounds, and `unsure` is how far off they
    may be.
    """

    id: str
    prompt: InitVar[list[int]]
    params: SamplingParams
    _: KW_ONLY
    max_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()  # tokens that end the request when sampled
    priority: int = API
    arrival: float = 0.0
    deadline: float | None = None
    salt: str = ""
    adapter: str = ""  # the name of a LoRA adapter; empty: the model as it is
    pooling: str | None = None  # one of POOLINGS: it says nothing, and ends with a vector of its prompt's hidden states
    pushes: bool = False  # it is over when its blocks are where this engine pushes them
    keep: bool = False  # when it has ended well, its keys and values stay, held under its id
    continues: str | None = None  # a held sequence that its prompt begins as
    modules: list[Module] = field(default_factory=list)  # in their order, without overlap
    is_module: bool = False  # computes one for others: nobody hears of it

    # What it has come to (from here on nobody but the engine sets anything)
    tokens: list[int] = field(init=False)  # known tokens: prompt, then output
    prompt_len: int = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    pooled: list[float] = field(default_factory=list)
    state: State = State.WAITING
    finish: Finish | None = None
    error: str | None = None
    metrics: Metrics = field(init=False)

    # Where it stands on the device
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    pruned: int = 0  # leading tokens that have no slot in the blocks any more (`kv/pruning.py`)
    pending: int = 0  # tokens that launched steps will sample, at least: one for each
    unsure: int = 0  # and beyond that: drafts whose fate only the device knows yet
    told: int = 0  # leading tokens that every stage of a pipeline knows
    adapter_key: str = ""  # what the adapter's name stood for when it was added
    slot: int = -1  # where the adapter is on the device, while it is WAITING or RUNNING
    in_flight: int = 0  # launched steps that hold this request
    last_step: int = 0  # number of the newest step that held it
    last_start: int = 0  # first position it computed there
    fence: int = 0  # newest step that reads its blocks, as its own or as a fork's source
    waits_for: Wait | None = None  # parked, or running and not in steps for now
    # Proposed tokens from position `num_tokens` on. The device verifies as many as there are beyond `unsure`: where
    # it is further than the host knows, it takes those that stand at its own positions.
    drafts: list[int] = field(default_factory=list)

    # The prefix cache's view
    identities: list[bytes] = field(default_factory=list)
    num_published: int = 0  # leading blocks of this request that are in the prefix index
    failed_fetches: int = 0  # times that blocks on their way did not arrive, since it last ran
    num_exact: int = sys.maxsize  # leading tokens whose keys and values follow from the tokens before them alone
    copied: list[tuple[int, int]] = field(default_factory=list)  # spans ahead that are not computed
    gathered: int = 0  # times that it waited for modules, since it last ran
    looked_ahead: bool = False  # whether other places were asked for its blocks while it was far back in the queue

    # Scheduling
    lane: int = field(init=False)  # effective class, fixed when it is admitted
    promoted: bool = False  # admitted above its class because it had waited long
    started_on_others: bool = False  # holds blocks that another request filled
    avoids_cache: bool = False  # had logits that were NaN: uses nobody's blocks any more
    in_float32: bool = False  # had them on its own, too: is computed in float32 (retry)
    void_until: int = 0  # results of launched steps up to this one are dropped
    followers: list[Request] = field(default_factory=list)  # siblings that fork its prompt (n > 1)
    fork_from: Request | HeldSequence | None = None
    fork_tokens: int = 0  # leading tokens whose keys and values are shared with fork_from
    common_tokens: int = 0  # leading tokens that it has in common with what it continues
    beams: Beams | None = None
    grammar: Constraint | None = None  # of its structured output, made by the engine

    def __post_init__(self, prompt: list[int]) -> None:
        self.tokens, self.prompt_len = list(prompt), len(prompt)
        self.metrics = Metrics(arrival=self.arrival)
        self.lane = self.priority

    @property
    def num_tokens(self) -> int:
        """At least so many; drafts in flight may add `unsure` more."""
        return len(self.tokens) + self.pending

    @property
    def num_drafts(self) -> int:
        """Proposed tokens that the next step verifies."""
        return max(0, len(self.drafts) - self.unsure)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def scored_from(self) -> int:
        """The first position whose log-probability is asked for, where those of the prompt are."""
        return max(1, self.params.prompt_logprobs_start)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def reads_all(self) -> bool:
        """Whether something is wanted of every token of its prompt: nobody else's blocks can help."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def awaits_mask(self) -> bool:
        """Whether it cannot run because nobody knows yet which tokens its grammar allows next."""
        return self.grammar is not None and not self.grammar.ready

    def work(self) -> int:
        """Tokens that a step could compute now, drafts included."""
        num_tokens = len(self.tokens) + self.pending
        last_is_out = self.pending and num_tokens + self.unsure - self.prompt_len >= self.max_tokens
        # The token that reaches max_tokens never becomes an input. (A property costs: this runs per row and step.)
        if self.waits_for is not None or last_is_out or (self.grammar is not None and self.awaits_mask):
            return 0
        if self.copied:
            return self.copied[0][0] - self.num_computed
        return num_tokens - self.num_computed + (self.num_drafts if self.drafts else 0)

    def pass_copied(self) -> None:
        """What begins where it stands is there already."""
        while self.copied and self.copied[0][0] <= self.num_computed:
            self.num_computed = self.copied.pop(0)[1]

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, {self.state.value}, {self.num_computed}/{self.num_tokens} tokens, "
            f"row {self.row}, {len(self.blocks)} blocks)"
        )
