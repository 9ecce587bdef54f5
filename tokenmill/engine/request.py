"""Request: one sequence of tokens on its way through the engine, its state, and what it waits for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.engine.beams import Beams
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
    preemptions: int = 0

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


class Request:
    """One sequence. `num_computed` chases `num_tokens`; there are no phases.

    Positions [0, num_computed) have keys and values in `blocks`, or will have once the launched steps ran.
    Tokens that a launched step will sample count in `num_tokens` before their values are known. How long a row is may
    be known to the device alone: with drafts in flight both numbers are lower bounds, and `unsure` is how far off they
    may be.
    """

    __slots__ = (
        "arrival",
        "avoids_cache",
        "beams",
        "blocks",
        "cumulative_logprob",
        "deadline",
        "drafts",
        "error",
        "fence",
        "finish",
        "followers",
        "fork_from",
        "fork_tokens",
        "grammar",
        "id",
        "identities",
        "in_flight",
        "in_float32",
        "lane",
        "last_start",
        "last_step",
        "logprobs",
        "max_tokens",
        "metrics",
        "num_computed",
        "num_published",
        "params",
        "pending",
        "pooled",
        "pooling",
        "priority",
        "promoted",
        "prompt_len",
        "prompt_logprobs",
        "row",
        "salt",
        "seed",
        "started_on_others",
        "state",
        "stop_ids",
        "tokens",
        "unsure",
        "void_until",
        "waits_for",
    )

    def __init__(
        self,
        id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = API,
        arrival: float = 0.0,
        deadline: float | None = None,
        salt: str = "",
        pooling: str | None = None,
    ) -> None:
        self.id = id
        self.params = params
        self.seed = seed
        self.priority = priority
        self.arrival = arrival
        self.deadline = deadline
        self.salt = salt
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids  # tokens that end the request when sampled
        self.tokens = list(prompt)  # known tokens: prompt, then output
        self.prompt_len = len(prompt)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        # One of POOLINGS: it says nothing, and ends with a vector of its prompt's hidden states
        self.pooling = pooling
        self.pooled: list[float] = []
        self.state = State.WAITING
        self.finish: Finish | None = None
        self.error: str | None = None
        self.metrics = Metrics(arrival=arrival)
        # Where it stands on the device
        self.row = -1
        self.blocks: list[int] = []
        self.num_computed = 0
        self.pending = 0  # tokens that launched steps will sample, at least: one for each that samples
        self.unsure = 0  # tokens that they may sample beyond that: drafts whose fate only the device knows yet
        self.in_flight = 0  # launched steps that hold this request
        self.last_step = 0  # number of the newest step that held it
        self.last_start = 0  # first position it computed there
        self.fence = 0  # number of the newest step that reads its blocks, as its own or as the source of a fork
        self.waits_for: Wait | None = None  # parked, or running and not in steps for now
        # Proposed tokens from position `num_tokens` on. The device verifies as many as there are beyond `unsure`: where
        # it is further than the host knows, it takes those that stand at its own positions.
        self.drafts: list[int] = []
        # The prefix cache's view
        self.identities: list[bytes] = []
        self.num_published = 0  # leading blocks of this request that are in the prefix index
        # Scheduling
        self.lane = priority  # effective class, fixed when it is admitted
        self.promoted = False  # admitted above its class because it had waited long
        self.started_on_others = False  # holds blocks that another request filled
        self.avoids_cache = False  # had logits that were NaN: uses nobody's blocks any more
        self.in_float32 = False  # had them on its own, too: is computed in float32 (retry)
        self.void_until = 0  # results of launched steps up to this one are dropped
        # Siblings that start from this request's prompt (n > 1), and where a fork starts
        self.followers: list[Request] = []
        self.fork_from: Request | None = None
        self.fork_tokens = 0  # leading tokens whose keys and values are shared with fork_from
        self.beams: Beams | None = None
        self.grammar: Constraint | None = None  # the state of its structured output, made by the engine

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
    def finished(self) -> bool:
        return self.state is State.FINISHED

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
        return num_tokens - self.num_computed + (self.num_drafts if self.drafts else 0)

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, {self.state.value}, {self.num_computed}/{self.num_tokens} tokens, "
            f"row {self.row}, {len(self.blocks)} blocks)"
        )
