"""EngineConfig: the one tree of settings. What is left unset is solved, and the reason is printed.

Each setting is declared once. Its check, the options of all commands, the keys of a settings file and the table of
docs/usage.md (`python scripts/settings_table.py`) come from here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.cache import root
from tokenmill.compat import did_you_mean, translate
from tokenmill.errors import ConfigError
from tokenmill.option import DERIVED, CommandDefault, Option, option, options_of
from tokenmill.option import command_defaults as _command_defaults
from tokenmill.parallel.layout import parse_layout as parse_parallel
from tokenmill.quant.forms import STORED, parse_layout

# Headings of --help.
WHERE = "Where it runs"
LOAD = "How much, how long"
MEMORY = "Memory"
STEPS = "How steps are computed"
ADAPTERS = "Adapters"
BEFORE = "The ways before ours, to compare with"

MOST_RANK = 256  # of an adapter

_ONE = CommandDefault(1, "one conversation is one request at a time")
_NEW_SEED = CommandDefault(lambda: random.getrandbits(32), "another one each time, and so another answer")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:]+):\d{1,5}")
_NO_TEXT = CommandDefault(True, "nothing is asked in words")


@dataclass(frozen=True)
class EngineConfig:
    """Every setting of an engine. None (or "auto") means: solve it from the hardware and the model."""

    model: str = option(
        "default",
        '"default", a directory, a .gguf file, or a hub name (org/name, org/name:file.gguf)',
        WHERE,
        more='"default" is SmolLM2-135M-Instruct; a directory has a `config.json`',
    )
    load_format: str = option(
        "auto",
        "where the weights are: safetensors, gguf, auto (either), or dummy (made up at random)",
        WHERE,
        choices=("auto", "safetensors", "gguf", "dummy"),
        more="Checkpoints of compressed-tensors, GPTQ, AWQ and fp8 are safetensors",
    )
    dtype: str = option(
        "auto",
        "type of floats that is computed in",
        WHERE,
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        solved="float32 on a CPU, the checkpoint's own 16-bit type on a GPU",
    )
    device: str = option("auto", "what computes: cpu, cuda or cuda:1", WHERE, solved="a GPU if there is one")
    parallel: str | None = option(
        None,
        "ranks (processes) that compute the model together: tp2, or several kinds, such as tp2,pp2",
        WHERE,
        unset="one rank",
        more="[Below](#several-ranks)",
    )
    rank_listen: str | None = option(
        None,
        "with parallel: where ranks of other machines join (`tokenmill rank --join`)",
        WHERE,
        form="an address such as 0.0.0.0:7200",
        unset="all ranks are on this machine",
        more="[Below](#ranks-on-other-machines)",
    )
    rank_secret_file: str | None = option(
        None,
        "with rank_listen: a file with a secret of at least 16 bytes, the same on all machines",
        WHERE,
        form="the path of a file",
    )
    ranks_here: int | None = option(
        None,
        "with rank_listen: how many ranks, the first ones, are on this machine",
        WHERE,
        low=1,
        solved="those of the first stage of a pipeline; without stages one",
    )
    rank_patience: float = option(
        600.0,
        "with rank_listen: seconds that a rank of another machine is waited for, at the start and after its loss",
        WHERE,
        above=0.0,
        unit="seconds",
    )
    quantization: str | Mapping[str, str] | None = option(
        None,
        "how linear layers are stored and multiplied: int8, int4, w8a8, fp8, auto, or by layer: int4,layers.0-3=int8",
        WHERE,
        unset="as the checkpoint has them",
        more="[Below](#fewer-bits). `awq`, `gptq`, `compressed-tensors` and `gguf` mean the same as unset, and are "
        "refused unless the checkpoint is that",
    )
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are stored",
        WHERE,
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8", "int4"),
        solved="what suits model and device",
        more="`int8`, `fp8` and `int4` have scales of their own and are not for MLA models. Solved means: float16 with "
        "packed weights on a CPU, but for the floats of a safetensors checkpoint as they are and for "
        "`quantization=fp32`; else the model's `dtype` (the only floats that a GPU takes)",
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus answer, in tokens",
        WHERE,
        low=1,
        solved="what the model was made for, or what the KV cache holds",
        by_command={"bench trace": CommandDefault(DERIVED, "--context and what is added to it")},
    )
    cache_dir: str | None = option(
        None,
        "where downloads and builds are kept",
        WHERE,
        form="the path of a folder",
        unset="TOKENMILL_CACHE, or tokenmill in XDG_CACHE_HOME or ~/.cache",
        more="[Below](#where-things-are-kept)",
    )

    max_num_seqs: int | None = option(
        None,
        "requests that run at once",
        LOAD,
        low=1,
        solved="64 on a CPU, 256 or 512 on a GPU",
        by_command={
            "run": _ONE,
            "chat": _ONE,
            "bench latency": CommandDefault(DERIVED, "the largest --batch"),
            "bench trace": CommandDefault(DERIVED, "--rows and one newcomer"),
        },
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens per step, prompts and answers together",
        LOAD,
        low=1,
        solved="512 on a CPU, 2048, 8192 or 16384 on a GPU by how long they take; at least max_num_seqs",
    )
    policy: str = option(
        "priority",
        "who runs first: priority (by class), fcfs (first come) or sjf (by class, then shortest predicted answer)",
        LOAD,
        choices=("priority", "fcfs", "sjf"),
        more="With `priority` who waits long rises; with `sjf` nobody is passed by one who came over a minute later",
    )
    slo_itl_ms: float | None = option(
        None,
        "milliseconds that 95 % of the gaps between tokens may take: a step reads as much of prompts as that allows",
        LOAD,
        above=0,
        unit="milliseconds",
        unset="as much as fits",
    )
    slo_ttft_ms: float | None = option(
        None,
        "with slo_itl_ms: milliseconds to a first token; where this is missed more often, nobody is held back",
        LOAD,
        above=0,
        unit="milliseconds",
    )
    max_queued_requests: int = option(
        100_000,
        "requests that may wait; more are refused",
        LOAD,
        low=1,
        more="With `QueueFull`, over HTTP with 429; `LLM.generate` feeds them in as there is room",
        by_command={
            "serve": CommandDefault(10_000, "clients of a server are better told to come back than kept waiting")
        },
    )
    max_queued_tokens: int = option(
        50_000_000,
        "prompt tokens that may wait; more are refused",
        LOAD,
        low=1,
        by_command={
            "serve": CommandDefault(500_000, "clients of a server are better told to come back than kept waiting")
        },
    )

    gpu_memory_utilization: float = option(
        0.9, "share of the device's memory that may be used", MEMORY, above=0, high=1
    )
    max_memory: int | None = option(
        None,
        "bytes of the device's memory that may be used in all",
        MEMORY,
        low=1,
        unset="gpu_memory_utilization of a GPU, what is free beside a CPU",
        more="What does not fit is streamed: [below](#models-larger-than-the-memory)",
    )
    weights_offload: int | None = option(
        None,
        "bytes of weights that are brought to the device in every step, from the host's memory or, to a CPU, from disk",
        MEMORY,
        low=0,
        solved="as many as do not fit",
        more="Of a mixture experts, as `expert_cache` says; else whole layers, spread evenly. "
        "0: none, and what does not fit is refused",
    )
    expert_cache: str = option(
        "auto",
        "what happens to a mixture's experts that do not fit",
        MEMORY,
        choices=("auto", "lru", "predict", "off"),
        more="lru: each layer keeps those used last, and reads others when a step chooses them; predict: the next "
        "layer's are read ahead, too, as its router judges by this layer's input; auto: where that pays; off: whole "
        "layers are streamed",
    )
    kv_cache_memory: int | None = option(
        None, "bytes for the KV cache", MEMORY, low=1, solved="what is left on a GPU, at most 4 GiB on a CPU"
    )
    block_size: int | None = option(
        None, "tokens per KV block", MEMORY, low=1, form=" that is a power of two", solved="16"
    )
    enable_prefix_caching: bool = option(
        True, "keep the KV of prompts and answers, and use it when a prompt begins the same way", MEMORY
    )

    prompt_modules: bool | None = option(
        None,
        "keep parts of prompts that requests mark as modules, and copy them to wherever a prompt has them (bounded)",
        MEMORY,
        solved="on where the model's keys can be turned to another place",
        more="Nothing changes for prompts without marks. [Below](#modules-parts-of-prompts-in-any-order)",
    )
    module_reread_tokens: int = option(
        16,
        "first tokens of a module that are computed in each prompt, and not copied",
        MEMORY,
        low=0,
    )
    module_start: str | None = option(
        None,
        "a text that modules are computed behind: the more like what stands before them, the closer to reading them",
        MEMORY,
        form="the path of a text file",
        unset="a text that comes with tokenmill",
    )
    module_start_tokens: int | None = option(
        None,
        "how many tokens of it",
        MEMORY,
        low=1,
        solved="2048, at most a quarter of max_model_len and an eighth of the KV cache",
    )
    eviction: str = option(
        "lru",
        "which cached block goes first: lru (least recently used), lfu (fewest hits), cost (hits by work) or learned",
        MEMORY,
        choices=("lru", "lfu", "cost", "learned"),
        more="[What each finds](performance.md#eviction)",
    )
    kv_pruning: str | None = option(
        None,
        "drop keys and values of old tokens while requests run: all (window), or those with long keys (keynorm), or by "
        "a trained network (gate)",
        MEMORY,
        choices=("window", "keynorm", "gate"),
        unset="nothing is dropped",
        more="Answers change. [What it costs](performance.md#pruning)",
    )
    kv_pruning_keep: float = option(
        0.5, "with kv_pruning: share of old tokens that stays, in every layer and head", MEMORY, above=0, high=0.875
    )
    kv_pruning_window: int = option(
        64, "with kv_pruning: the newest tokens, of which none is dropped", MEMORY, low=16, unit="tokens"
    )
    kv_host_memory: int | None = option(
        None,
        "bytes of the host's memory for KV that the device has no room for",
        MEMORY,
        low=1,
        unset="none",
        more="[Below](#kv-beyond-the-device)",
    )
    kv_disk_path: str | None = option(
        None,
        "where KV is kept on disk: what was of use twice, or with no kv_host_memory everything; outlives the engine",
        MEMORY,
        form="the path of a folder",
        unset="nowhere",
        more="[Below](#kv-beyond-the-device)",
    )
    kv_disk_bytes: int | None = option(
        None,
        "with kv_disk_path: bytes that may be used there",
        MEMORY,
        low=1,
        solved="a tenth of what is free, at most 64 GiB",
    )

    kv_listen: str | None = option(
        None,
        "with kv_host_memory: where other engines of this model may bring KV to, and fetch it from",
        MEMORY,
        form="an address such as 0.0.0.0:7100",
        unset="nowhere",
        more="[Below](#kv-from-another-engine)",
    )
    kv_push_to: str | None = option(
        None,
        "the address that another engine listens at: what is computed here is brought there",
        MEMORY,
        form="an address such as 10.0.0.7:7100",
        unset="nowhere",
        more="[Below](#kv-from-another-engine)",
    )
    kv_transport: str = option(
        "tcp",
        "with kv_listen and kv_push_to: what carries blocks: tcp, or nixl where both sides have nixl-cu12 or -cu13",
        MEMORY,
        choices=("tcp", "nixl"),
    )
    kv_secret_file: str | None = option(
        None,
        "with kv_listen and kv_push_to: a file with a secret of at least 16 bytes, the same on both sides",
        MEMORY,
        form="the path of a file",
    )

    cuda_graphs: bool = option(
        True,
        "record steps and replay them: on a GPU as CUDA graphs, on a CPU with packed weights as native calls",
        STEPS,
    )
    prompt_graphs: bool = option(
        True,
        "with cuda_graphs: record steps that read prompts, too",
        STEPS,
        more="On a GPU those of up to some hundred tokens, in pieces between their attentions, which halves the time "
        "to the first token of short prompts and makes decode steps 1 to 2 % slower",
    )
    warm_up: bool = option(
        True,
        "on a GPU: compile and try every kernel that the settings can need before the engine is ready",
        STEPS,
        more="Otherwise that happens while the first requests wait",
    )
    shared_prefix_attention: bool = option(
        True, "read a beginning that many running requests share once per step (NVIDIA GPUs)", STEPS
    )
    adaptive_precision: bool = option(
        True,
        "compute a request whose logits are not finite in float16 or bfloat16 again in float32, apart from the others",
        STEPS,
        more="The log says so. `False`: it ends with an error, and the memory that is planned for it (`plan_lines()` "
        "says how much) goes to the cache",
    )
    speculation: str | None = option(
        None,
        "drafts of how answers go on: on (suffix, and the head that comes with the model), suffix (what followed the "
        "same words before), head:FILE, draft:MODEL (a smaller model with the same tokens), layers:NUMBER (the first "
        "of the model's own), several by commas, or off",
        STEPS,
        solved="on a CPU on while at most 4 requests decode; off on a GPU",
        more="The answer stays the same, and drafts that would not pay are not verified: "
        "[below](#drafts-speculative-decoding)",
    )
    batch_invariant: bool = option(
        False,
        "the same bits for a request whatever runs beside it, or a refusal; slower on a GPU",
        STEPS,
        more="[Below](#the-same-answer-or-the-same-bits)",
    )
    overlap: bool | None = option(None, "launch a step before the one before it is committed", STEPS, solved="on GPUs")
    ops: str | dict[str, str] | None = option(  # noqa: RUF009 (the default is no dict)
        None,
        "implementation to prefer: one name for all ops, or by op: attention=cpu,sample=reference",
        STEPS,
        solved="the first that can",
        more="In Python also `{op: name}`",
    )
    expert_capacity: float | None = option(
        None,
        "tokens of a step that one expert of a mixture may take, as a multiple of its even share; the rest go without",
        STEPS,
        above=0.0,
        unset="all that choose it",
        more="It changes answers, and they depend on what runs beside them: [below](#several-ranks)",
    )
    hot_experts: str | None = option(
        None,
        "experts that every rank has and takes turns at, where whole ones are divided (`ep`): 3,17",
        STEPS,
        unset="none",
    )
    allreduce_8bit_above: int | None = option(
        None,
        "bytes from which on a sum over ranks travels in eight bits, about a quarter of the bytes",
        STEPS,
        low=1,
        unset="every sum travels as it is",
        more="It changes answers, by a stated bound per sum: [below](#several-ranks)",
    )
    enable_lora: bool = option(
        False,
        "let requests name LoRA adapters, which are loaded while the engine runs",
        ADAPTERS,
        more="[adapters.md](adapters.md)",
    )
    max_loras: int = option(
        8,
        "with enable_lora: adapters that are on the device at once; requests with others wait for their turn",
        ADAPTERS,
        low=1,
    )
    max_lora_rank: int = option(
        16,
        "with enable_lora: the largest rank of an adapter",
        ADAPTERS,
        low=1,
        high=MOST_RANK,
        form=f" of at most {MOST_RANK}",
    )
    lora_host_memory: int = option(
        1 << 30,
        "with enable_lora: bytes of the host's memory for adapters that have no place on the device",
        ADAPTERS,
        low=1,
        more="Others are read from their folders again when they are asked for",
    )

    skip_tokenizer_init: bool = option(
        False,
        "no tokenizer: prompts are token ids, answers have no text",
        STEPS,
        by_command={
            "warm": _NO_TEXT,
            "bench trace": _NO_TEXT,
            "bench offline": CommandDefault(
                DERIVED, "with --load-format dummy: who makes weights up has often no tokenizer"
            ),
            "bench latency": CommandDefault(
                DERIVED, "with --load-format dummy: who makes weights up has often no tokenizer"
            ),
        },
    )
    seed: int = option(
        0,
        "source of the seeds of requests that have none of their own",
        STEPS,
        by_command={"run": _NEW_SEED, "chat": _NEW_SEED},
    )

    kv_cache: bool = option(
        True,
        "keep keys and values; without, everything is computed again for every token",
        BEFORE,
        more="This and the next three are for [ladder.md](ladder.md): nothing is gained by setting them",
    )
    kv_reservation: str = option(
        "on_demand",
        "when a request gets memory: on_demand, or for max_model_len tokens at its start",
        BEFORE,
        choices=("on_demand", "max_model_len"),
    )
    batching: str = option(
        "continuous",
        "who enters and leaves a running batch: continuous (all), dynamic (none enters), static (nor leaves; it pads)",
        BEFORE,
        choices=("continuous", "dynamic", "static"),
    )
    enable_chunked_prefill: bool = option(
        True, "cut long prompts; without, they are computed whole, in steps of their own", BEFORE
    )

    def __post_init__(self) -> None:
        for name, one in OPTIONS.items():
            one.check(getattr(self, name))
        if self.slo_ttft_ms is not None and self.slo_itl_ms is None:
            raise ConfigError("slo_ttft_ms is weighed against slo_itl_ms; set that, too")
        if self.kv_disk_bytes is not None and self.kv_disk_path is None:
            raise ConfigError("kv_disk_bytes says how much may be used in kv_disk_path; set that, too")
        if self.kv_listen is not None and self.kv_host_memory is None:
            raise ConfigError("kv_listen lets others bring KV to this engine's kv_host_memory; set that, too")
        for name in ("kv_listen", "kv_push_to"):
            address = getattr(self, name)
            if address is not None and not _ADDRESS.fullmatch(address):
                raise ConfigError(f"{name} is {address!r}; it must be host:port, such as 10.0.0.7:7100")
            if address is not None and self.kv_secret_file is None:
                raise ConfigError(f"{name} needs a secret that both sides know; set kv_secret_file")
        self._check_ranks()
        self._check_pruning()
        if self.cache_dir is not None:
            root(self.cache_dir)  # refuses an empty one
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two, such as 16")
        parse_speculation(self.speculation)
        parse_experts(self.hot_experts)
        if not isinstance(self.ops, str | dict | None):
            raise ConfigError(f"ops is {self.ops!r}; it is one name, or names by op, such as attention=cpu")
        if self.quantization not in ("auto", *STORED):  # whether the checkpoint has that format is seen when it is read
            parse_layout(self.quantization)

    def _check_ranks(self) -> None:
        """What ranks on other machines need."""
        ranks = parse_parallel(self.parallel).ranks
        if self.rank_listen is None:
            for name in ("rank_secret_file", "ranks_here"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is for ranks on other machines; set rank_listen, too, or leave it out")
            return
        if not _ADDRESS.fullmatch(self.rank_listen):
            raise ConfigError(f"rank_listen is {self.rank_listen!r}; it must be host:port, such as 0.0.0.0:7200")
        if self.rank_secret_file is None:
            raise ConfigError("rank_listen needs a secret that all machines know; set rank_secret_file")
        if ranks == 1:
            raise ConfigError("rank_listen is set and parallel is not, so there are no other ranks; set parallel='pp2'")
        if self.ranks_here is not None and self.ranks_here >= ranks:
            raise ConfigError(
                f"ranks_here is {self.ranks_here} and parallel {self.parallel!r}, which is {ranks} ranks: none is left "
                "for other machines; lower ranks_here, or leave rank_listen out"
            )

    def _check_pruning(self) -> None:
        """What pruning does not go together with."""
        if self.kv_pruning is None:
            return
        for name, instead in (
            ("speculation", (None, "off")),
            ("eviction", ("lru",)),
            ("batching", ("continuous",)),
            ("kv_cache", (True,)),
            ("enable_chunked_prefill", (True,)),
            ("parallel", (None,)),
            *((place, (None,)) for place in ("kv_host_memory", "kv_disk_path", "kv_listen", "kv_push_to")),
        ):
            value = getattr(self, name)
            if value not in instead:
                raise ConfigError(
                    f"kv_pruning is {self.kv_pruning!r} and {name} is {value!r}, which do not go together; leave one "
                    "of them out"
                )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from keyword arguments, naming the closest setting when one is unknown."""
        options = translate(options)
        for name in options:
            if name not in OPTIONS:
                raise ConfigError(f"there is no setting {name!r}; {did_you_mean(name, OPTIONS)}")
        if isinstance(ops := options.get("ops"), str) and "=" in ops:
            options["ops"] = _parse_ops(ops)
        return cls(**options)


OPTIONS: dict[str, Option] = options_of(EngineConfig)


def command_defaults(command: str, **derived: Any) -> dict[str, Any]:
    """Settings that a command takes where nothing is said and the default is another; `derived`: what it worked out."""
    return _command_defaults(OPTIONS, command, derived)


def parse_experts(text: str | None) -> tuple[int, ...]:
    """Numbers of experts, each once, in their order."""
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
    if any(not (part.isascii() and part.isdigit() and len(part) < 6) for part in parts):
        raise ConfigError(f"hot_experts is {text!r}; it must be numbers of experts separated by commas: 3,17")
    return tuple(sorted({int(part) for part in parts}))


def parse_speculation(text: str | None) -> list[tuple[str, str]]:
    """Kinds of proposers that are named, and what each is made from."""
    if text in (None, "on", "off"):
        return []
    parts = [part.strip().partition(":") for part in text.split(",")] if isinstance(text, str) else [("", "", "")]
    kinds = [kind for kind, _, _ in parts]
    for kind, _, path in parts:
        if kinds.count(kind) > 1 and kind in ("suffix", "head"):
            raise ConfigError(f"speculation is {text!r}; one {kind} is enough, leave the others out")
        if not ((kind == "suffix" and not path) or (kind in ("head", "draft", "layers") and path)):
            raise ConfigError(
                f"speculation is {text!r}; it must be on, off, suffix, head:FILE, draft:MODEL, layers:NUMBER, or "
                "several of the last four separated by commas: suffix,head:FILE"
            )
    return [(kind, path) for kind, _, path in parts]


def _parse_ops(text: str) -> dict[str, str]:
    parts = [part.strip().partition("=") for part in text.split(",")]
    if not all(op and name for op, _, name in parts):
        raise ConfigError(f"ops is {text!r}; it is one name, or names by op, written as attention=cpu,sample=reference")
    return {op.strip(): name.strip() for op, _, name in parts}
