"""The messages between the front process and the engine process, and their encoding.

A sequence travels under a `key`, a number that the front never uses twice: what arrives late cannot be taken for
somebody else's. Times are seconds in the engine's monotonic clock, or spans. Everything is msgpack, arrays with tags.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenmill.params import SamplingParams
from tokenmill.sampling.records import TokenLogprobs

VERSION = 13  # both processes come from one installation; this catches the one that was replaced while it ran


class SubmittedSequence(msgspec.Struct, array_like=True, frozen=True):
    key: int
    seed: int
    output: list[int] = []  # what it has said already: not empty when it goes on after a restart


class SequenceUpdate(msgspec.Struct, array_like=True):
    """What one step added to one sequence."""

    key: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: str | None = None  # a Finish; set in the last update only
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with its first tokens
    request_fault: bool = False  # the error is of the request's own making: no other engine would do better
    pooled: list[float] | None = None  # the vector that it was asked for, with its last update


class Admitted(msgspec.Struct, array_like=True, frozen=True):
    """The engine has begun with a sequence: it is in a step for the first time since it was submitted."""

    key: int
    scheduled: float | None  # when it was let in
    cached_tokens: int  # prompt tokens that the prefix cache supplied
    module_tokens: int = 0  # and those that were copied from modules


class TierReport(msgspec.Struct, array_like=True, frozen=True):
    """Of a place beside the device that holds KV: host memory, disk. Blocks, since the engine process started."""

    read: int = 0
    written: int = 0
    failed: int = 0  # neither arrived nor kept, though they were to be
    refused: int = 0  # because too much was waiting
    spared: int = 0  # not read, because to compute them was expected to be faster
    waiting: int = 0  # under way now
    bandwidth: float = 0.0  # bytes per second of reads, of late; 0: none yet
    held: int = 0  # there now
    room: int = 0  # for so many; 0: another engine's, which alone knows


class CachedReport(msgspec.Struct, array_like=True, frozen=True):
    """Experts of a mixture, each counted once for a layer and step that chose it."""

    slots: int  # of every layer
    of: int  # experts that a layer has
    hits: int
    misses: int
    foreseen: int  # were brought, or on their way, because they were foreseen
    wasted: int  # were foreseen, and left unused


class StreamedReport(msgspec.Struct, array_like=True, frozen=True):
    """Layers, or experts, that were brought to the device."""

    nbytes: int
    layers: int
    stalls: int  # layers that were waited for; of a GPU nobody knows
    stall_seconds: float
    overlap_seconds: float  # of bringing them, in which something else was computed
    experts: CachedReport | None = None  # where it is experts that are brought: no layers, and stalls are theirs


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's stats. Counters count since this engine process started."""

    running: int = 0
    blocks: int = 0
    free_blocks: int = 0  # without content
    cached_blocks: int = 0  # free, but with content that a later request may find
    block_size: int = 0
    steps: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    cache_queried: int = 0  # prompt tokens
    cache_hit: int = 0
    evicted_blocks: int = 0
    memory: int = 0  # resident bytes of the process
    device_memory: int = 0  # bytes held on the device, 0 on a CPU
    late_kernels: int = 0  # compiled or loaded while requests waited for them
    # Proposer -> drafts that were verified, those that held, rows of steps that verified any
    drafts: dict[str, tuple[int, int, int]] = {}
    # Of an eviction policy other than LRU: its name, cached blocks that newcomers found, those that LRU would have had,
    # times that LRU took over
    eviction: tuple[str, int, int, int] | None = None
    tiers: dict[str, TierReport] = {}
    block_bytes: int = 0  # of a block as tiers hold it; 0: there are none
    module_placed: int = 0  # prompt tokens that were copied from modules
    swapped: int = 0  # preempted requests whose blocks were read back from a tier
    experts: list[int] = []  # how often each was chosen, over all layers; empty: nobody counts
    experts_dropped: int = 0  # choices beyond an expert's capacity
    streamed: StreamedReport | None = None  # where not all weights are on the device
    # LoRA adapters: known by name, on the device, loaded to it, evicted from it. None: there are none.
    adapters: tuple[int, int, int, int] | None = None
    awaiting_adapters: int = 0  # requests that wait for one to be on the device


class SequenceSnapshot(msgspec.Struct, array_like=True, frozen=True):
    """A request in the engine, for those who watch."""

    key: int
    running: bool
    prompt: int
    output: int
    computed: int
    blocks: int
    cached: int
    age: float  # seconds since it arrived


class EngineSnapshot(msgspec.Struct, array_like=True, frozen=True):
    """The inside of the engine: costs a walk over all blocks, so it is made only when asked for."""

    blocks: bytes  # one byte per block, see FREE..SHARED
    rows: list[SequenceSnapshot]


FREE, CACHED, USED, SHARED = 0, 1, 2, 3  # a block: empty; free with content; held by one; held by several


# To the engine


class Submit(msgspec.Struct, array_like=True, tag=1):
    """One request. Several sequences share the prompt (n > 1); with output already there, they are on their own."""

    sequences: list[SubmittedSequence]
    prompt: list[int]
    params: SamplingParams  # with what it says about structured output; its grammar is advanced over `output`
    max_tokens: int
    stop_ids: list[int]
    priority: int
    waited: float  # since it arrived: keeps its place in the queue after a restart
    deadline_in: float | None
    salt: str
    pooling: str | None = None  # a vector of the prompt is asked for, not an answer
    pushes: bool = False  # its last update waits until the blocks of its prompt are where this engine pushes them
    keep: bool = False  # when it has ended well, its keys and values stay under its key, until Drop
    continues: int | None = None  # the key of one that stayed, which its prompt begins as
    adapter: str = ""  # the name of a LoRA adapter
    modules: list[tuple[int, int]] = []  # first and end of its parts that are


class Cancel(msgspec.Struct, array_like=True, tag=2):
    key: int
    why: str  # a Finish


class Drop(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """Nobody will continue what the sequence of this key left behind."""

    key: int


class Ping(msgspec.Struct, array_like=True, tag=3):
    """Asks for a Heartbeat."""

    view: bool = False


class ResetPrefixCache(msgspec.Struct, array_like=True, tag=4):
    """Empty the prefix cache, or the part of one salt."""

    salt: str | None = None


class FollowCache(msgspec.Struct, array_like=True, tag=6):
    """Tell what the prefix cache holds, and from then on what changes; or no longer."""

    follow: bool = True


class LoadAdapter(msgspec.Struct, array_like=True, tag=8):
    """Read a LoRA adapter; AdapterLoaded answers, and requests that are sent after that may name it.

    One that the last engine had is `known`: it is read before the next message is, and has to be the same.
    """

    number: int  # of the question
    name: str
    path: str
    known: str = ""  # the key that it had


class UnloadAdapter(msgspec.Struct, array_like=True, tag=9):
    """Nobody may name it any more."""

    name: str


class Stop(msgspec.Struct, array_like=True, tag=5):
    """Leave now; whoever wants requests finished waits for them first."""


# From the engine


class Loading(msgspec.Struct, array_like=True, tag=21):
    """The engine is being built; it also says that it is alive."""

    done: int
    total: int
    what: str


class EngineReady(msgspec.Struct, array_like=True, tag=22):
    """The engine is ready, and these are the facts that a front needs."""

    version: int
    pid: int
    vocab_size: int
    max_len: int
    eos_ids: tuple[int, ...]
    max_rows: int
    max_step_tokens: int
    model: str  # its name
    report: list[str]  # what was chosen and why, one line each
    block_size: int = 0  # tokens per identity of the prefix cache
    pruning: str = ""  # what these identities say of the keys that are dropped


class StepDone(msgspec.Struct, array_like=True, tag=23):
    """One turn of the loop. Sent after each, so its number growing is the sign of progress."""

    number: int  # turns of the loop since the process started
    at: float  # when it was sent
    seconds: float  # how long the turn took
    decodes: int  # rows that computed one token in the step launched now
    prefill_tokens: int
    updates: list[SequenceUpdate]
    admitted: list[Admitted] = []  # with the step launched now
    prefill_pairs: float = 0  # of a token of a prompt and one that it attends to, in that step


class Heartbeat(msgspec.Struct, array_like=True, tag=24):
    """Sent a few times per second while there is work, when the work ends, and when asked for."""

    stats: EngineStats
    view: EngineSnapshot | None = None


class CacheChange(msgspec.Struct, array_like=True, tag=25):
    """Identities that the prefix cache stored and evicted since the last of these messages, one behind the other. The
    first one after FollowCache is `whole`: all that is there."""

    stored: bytes
    evicted: bytes
    whole: bool = False


class AdapterLoaded(msgspec.Struct, array_like=True, tag=27):
    """What became of a LoadAdapter."""

    number: int
    name: str
    key: str | None
    error: str | None


class Fatal(msgspec.Struct, array_like=True, tag=26):
    """The last message of an engine that cannot go on."""

    kind: str  # the error's class name; ConfigError and ModelError are the user's to mend
    text: str


ToEngine = Submit | Cancel | Drop | Ping | ResetPrefixCache | FollowCache | LoadAdapter | UnloadAdapter | Stop
FromEngine = Loading | EngineReady | StepDone | Heartbeat | CacheChange | AdapterLoaded | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
