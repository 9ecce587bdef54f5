"""Builds an engine from a config: finds the model, plans memory, loads weights, and joins the parts."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tokenmill.collector import collector_paused
from tokenmill.config import EngineConfig
from tokenmill.engine.adapted import add_adapters, check_adapters
from tokenmill.engine.adapter_room import adapter_base, with_slots
from tokenmill.engine.checkpoints import Progress, load_tokenizer
from tokenmill.engine.choices import choose_device, matrix_shapes
from tokenmill.engine.core import Engine
from tokenmill.engine.identity import model_identity
from tokenmill.engine.kernels import start_compiler, warm_up_kernels
from tokenmill.engine.modules import module_rules
from tokenmill.engine.pruning import pruning_for, pruning_lines
from tokenmill.engine.rank_model import RankModel, RankRunner, load_model, most_verified, prepare
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.processes import RankProcesses
from tokenmill.engine.ranks.shared_kv import block_memory, shared_kv_for
from tokenmill.engine.ranks.start import (
    gather_ranks,
    group_lines,
    load_order,
    smallest_hardware,
    start_ranks,
    threads_of_rank,
)
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.batching import BATCHING
from tokenmill.engine.scheduler.control import pace_for
from tokenmill.engine.scheduler.data_parallel import DataParallelScheduler
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.engine.scheduler.modules import ModuleRules
from tokenmill.engine.scheduler.policy import POLICIES
from tokenmill.engine.speculation.choose import draft_model_for, eagle_head_for, no_drafts_in_groups, speculation_for
from tokenmill.engine.speculation.draft_model import DraftModel
from tokenmill.engine.speculation.eagle import with_head
from tokenmill.engine.tiers import add_tiers
from tokenmill.errors import ConfigError
from tokenmill.kv.manager import KVManager
from tokenmill.model.decoder import Decoder
from tokenmill.model.eagle import EagleHead
from tokenmill.model.layers import MLPWeights, WeightStore, linears
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights.checkpoint import GroupCheckpoint
from tokenmill.model.weights.source import ModelFiles
from tokenmill.offload.feed import Feed
from tokenmill.offload.streamed import CachedExpertWeights, StreamedWeights
from tokenmill.ops.device_facts import outdated
from tokenmill.ops.matmul import Matmul
from tokenmill.ops.native.library import LEVEL_NAMES, Library
from tokenmill.ops.registry import Ops
from tokenmill.parallel.layout import parse_layout
from tokenmill.plan.solve.settings import SolvedSettings, solve
from tokenmill.quant.schemes.choose import describe
from tokenmill.sampling.grammar import Grammars

if TYPE_CHECKING:
    from tokenmill.ops.triton.compiler import KernelCompiler


@dataclass(frozen=True)
class Built:
    """A ready engine and what its front needs to know."""

    engine: Engine
    tokenizer: Tokenizer | None
    spec: DecoderSpec
    settings: SolvedSettings
    files: ModelFiles
    report: list[str]  # what was chosen and why, one line each
    slower: str | None  # why this is slower here than it need be, and what to do


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    tell = progress or (lambda done, total, what: None)
    check_adapters(config)
    check_expert_cache(config)
    device = choose_device(config.device)
    waking = threading.Thread(target=_wake, args=(device,), daemon=True)
    waking.start()  # a GPU's driver takes a while, during which Triton can be imported
    compiler = start_compiler(config, device)
    ranks, threads = start_ranks(config, device), torch.get_num_threads()  # they import the engine meanwhile
    try:
        with collector_paused():
            return _build(config, device, compiler, tell, ranks, threads)
    except BaseException:
        if ranks is not None:
            ranks.close()
            torch.set_num_threads(threads)
        raise
    finally:
        waking.join()
        if compiler is not None:
            compiler.close()


def check_expert_cache(config: EngineConfig) -> None:
    """Refuse it with ranks before anybody waits for them."""
    if config.expert_cache in ("lru", "predict") and parse_layout(config.parallel).ranks > 1:
        raise ConfigError(
            f"expert_cache is {config.expert_cache!r} and parallel {config.parallel!r}, but several ranks do not cache "
            "experts; leave one of the two out"
        )


def _wake(device: torch.device) -> None:
    """Have a GPU's driver make its context, and the library of products load itself."""
    if device.type != "cuda":
        return
    with contextlib.suppress(RuntimeError):  # whoever uses it next is told
        square = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        torch.mm(square, square)


def _build(
    config: EngineConfig,
    device: torch.device,
    compiler: KernelCompiler | None,
    tell: Progress,
    ranks: RankProcesses | None,
    threads: int,  # that torch has here
) -> Built:
    made = prepare(config, device, tell, None if ranks is None else threads_of_rank(ranks.near))
    gather_ranks(config, made, ranks, tell)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(made.files, made.checkpoint)
    slower = why_slower(made.native, config, device)
    sizes = made.sizes
    draft = draft_model_for(config, made.spec, tokenizer, made.target, made.kv_dtype, tell)
    sizes = sizes if draft is None else draft.beside(sizes)
    eagle = eagle_head_for(config, made.spec)
    sizes = sizes if eagle is None else with_head(sizes, eagle, made.dtype)
    sizes = sizes if ranks is None else replace(sizes, layers=())  # ranks do not wait for each other's disks
    if config.expert_cache in ("lru", "predict") and made.spec.moe is None:
        raise ConfigError(
            f"expert_cache is {config.expert_cache!r}, but {made.spec.architecture} has no experts; leave it out"
        )
    if ranks is not None or config.expert_cache == "off":
        sizes = replace(sizes, expert_bytes=())
    base = adapter_base(config, made)
    sizes = sizes if base is None else with_slots(sizes, config, base, made)
    settings = solve(config, sizes, made.spec.max_positions, smallest_hardware(device, ranks))
    order, shared_kv = load_order(config, made, settings), shared_kv_for(config, made, settings)
    group = None if ranks is None else RankGroup(ranks, order, threads, shared_kv=shared_kv)
    model = load_model(config, settings, made, tell)
    # The engine of a server has no tokenizer until it needs one for a grammar.
    a_tokenizer = lambda: tokenizer or load_tokenizer(made.files, None)  # noqa: E731
    grammars = Grammars(a_tokenizer, made.spec.eos_ids)
    modules, modules_line = module_rules(config, made.spec, settings, a_tokenizer)
    if group is None:
        runner = model.runner(hidden_is_read=eagle is not None)
    else:
        group.slots = model.adapters
        group.complete(model.runner, tell)
        runner = group.runner
    engine, drafts = join(model, runner, group, grammars, draft, eagle, modules)
    made_up = config.seed if made.checkpoint is None else None
    computed = device.type, str(made.dtype), config.quantization, config.batch_invariant, config.ops, config.speculation
    engine.feed = model.weights.feed if isinstance(model.weights, StreamedWeights | CachedExpertWeights) else None
    identity = model_identity(made.files, made_up, *computed)
    tiers = add_tiers(config, engine, identity, block_memory(model, runner, shared_kv))
    adapters = [] if base is None else add_adapters(config, base, engine, model, group)
    warmed = [] if compiler is None else warm_up_kernels(compiler, engine, settings, tell)
    checkpoint = made.checkpoint
    report = [
        f"model        {made.files.name} ({made.spec.architecture}, {made.spec.num_layers} layers)",
        f"device       {device}, {str(made.dtype).removeprefix('torch.')} ({made.dtype_why})",
        *group_lines(config, made, ranks),
        f"linear       {describe(made.schemes, matrix_shapes(made.spec))} ({made.schemes_why})",
        *(f"weights      {note}" for note in (checkpoint.notes() if isinstance(checkpoint, GroupCheckpoint) else [])),
        *_native_lines(made.native, slower, device),
        f"kv cache     {made.kv_name} ({made.kv_why})",
        *settings.memory.lines(settings.num_blocks * settings.block_size),
        *_streaming_lines(model.weights, settings, made.spec),
        *tiers,
        *adapters,
        *settings.reasons,
        *_eviction_lines(engine.scheduler.parts[0].kv),
        f"modules      {modules_line}",
        *pruning_lines(engine.scheduler.parts[0].kv.pruning),
        f"speculation  {drafts}",
        *_ops_lines(model.ops),
        *warmed,
        *matmul_lines(runner.decoder),
        *(f"passed over  {line}" for line in passed_over(runner.decoder)),
    ]
    return Built(engine, tokenizer, made.spec, settings, made.files, report, slower)


def join(
    model: RankModel,
    runner: RankRunner,
    group: RankGroup | None,
    grammars: Grammars | None = None,
    draft: DraftModel | None = None,
    eagle: EagleHead | None = None,
    modules: ModuleRules | None = None,
) -> tuple[Engine, str]:
    """Scheduler and KV beside a runner, or the group that it is the first rank of; and how drafts are made."""
    config, settings, device = model.config, model.settings, model.prepared.device
    if not config.enable_chunked_prefill and settings.max_step_tokens < settings.max_len:
        raise ConfigError(
            f"enable_chunked_prefill is off, so max_num_batched_tokens ({settings.max_step_tokens}) has to be at least "
            f"max_model_len ({settings.max_len}): raise the first, or lower the second"
        )
    limits = Limits(
        max_rows=settings.max_rows,
        max_step_tokens=settings.max_step_tokens,
        max_verified=most_verified(settings),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        float32_retry=model.prepared.guarded,
        max_len=settings.max_len,
        whole_prompts=not config.enable_chunked_prefill,
        stages=len(model.prepared.stages),
        reserved_tokens=settings.max_len if config.kv_reservation == "max_model_len" else 0,
    )
    groups = parse_layout(config.parallel).dp
    if groups > 1:  # a queue for each
        limits = replace(
            limits,
            max_queued_requests=-(-limits.max_queued_requests // groups),
            max_queued_tokens=-(-limits.max_queued_tokens // groups),
        )
    isolation, policy = Isolation(), POLICIES[config.policy]()

    def scheduler_of_group() -> Scheduler:
        batching = BATCHING[config.batching](kv_cache=config.kv_cache)
        return Scheduler(
            limits,
            KVManager(
                settings.num_blocks,
                settings.block_size,
                config.enable_prefix_caching and batching.may_share,
                config.eviction,
                pruning_for(config, settings.block_size, model.prepared.spec),
            ),
            policy,
            pace=pace_for(limits, config.slo_itl_ms, config.slo_ttft_ms),
            batching=batching,
            find_shared_prefixes=config.shared_prefix_attention
            and not config.batch_invariant
            and device.type == "cuda"
            and config.kv_pruning is None
            and None in model.prepared.spec.windows,
            isolation=isolation,
            modules=modules,
        )

    parts = [scheduler_of_group() for _ in range(groups)]
    scheduler = parts[0] if groups == 1 else DataParallelScheduler(parts, isolation)
    # A CPU computes a step while launching it: to be a step behind would only hold answers back.
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    graphs = model.records(runner.decoder)
    most = max(settings.max_rows, limits.max_verified)
    if isinstance(runner, TorchRunner):
        speculation, why = speculation_for(config, runner, graphs, most, draft, eagle, alone=group is None)
    else:
        speculation, why = None, no_drafts_in_groups(config)
    return Engine(scheduler, group or runner, overlap=overlap, grammars=grammars, speculation=speculation), why


def why_slower(native: Library | str | None, config: EngineConfig, device: torch.device) -> str | None:
    """What keeps a model from the fastest kernels of its device though nobody asked for that, and what to do."""
    if isinstance(native, str):
        return f"the native CPU library is not there, so this is slower than it could be: {native}"
    if device.type == "cpu" and config.ops is None and config.dtype in ("bfloat16", "float16"):
        return (
            f"the native CPU library is not used, because it computes in float32 and dtype is {config.dtype}: one "
            "request is several times as slow; leave dtype out, and weights stay as they were saved all the same"
        )
    if device.type == "cuda" and config.ops in (None, "triton"):
        return outdated(device)
    return None


def _eviction_lines(kv: KVManager) -> list[str]:
    if kv.eviction is None:  # least recently used, if any
        return []
    return [f"eviction     {kv.eviction.name}: {kv.eviction.about} (as set)"]


def _streaming_lines(weights: WeightStore, settings: SolvedSettings, spec: DecoderSpec) -> list[str]:
    """What it costs that layers, or experts, are away."""
    away, cached = settings.memory.streamed, settings.memory.cached
    if not isinstance(weights, StreamedWeights | CachedExpertWeights):
        return []
    feed: Feed = weights.feed
    speed = f"{feed.bandwidth / 1e9:.2g} GB/s, as weights were read while loading" if feed.bandwidth else ""
    if spec.moe is not None and cached.slots:
        nbytes = cached.bytes_of_token(spec.moe.top_k)
        cost = f": {nbytes / feed.bandwidth:.2g} s, at {speed}" if speed else ""
        return [
            f"experts      {cached.slots} of {cached.experts} of every layer are here, the others on {feed.place}; "
            f"were all chosen equally often, a token alone would wait for {nbytes / 1e6:,.1f} MB{cost}"
        ]
    seconds = away.seconds(feed.bandwidth) if speed else 0.0
    cost = f": about {seconds:.2g} s of each, at {speed}, however many tokens it has" if speed else ""
    return [f"streaming    {away.nbytes / 1e6:,.0f} MB in every step from {feed.place}{cost}"]


def _native_lines(native: Library | str | None, slower: str | None, device: torch.device) -> list[str]:
    if slower is not None and device.type == "cpu":
        return [f"native       {slower}"]
    if not isinstance(native, Library):
        return []
    elsewhere = f"; {native.note}" if native.note is not None else ""
    return [f"native       {LEVEL_NAMES[native.level]}, {native.threads} threads{elsewhere}"]


def _ops_lines(ops: Ops) -> list[str]:
    by_name: dict[str, list[str]] = {}
    for op, implementation in ops.chosen.items():
        by_name.setdefault(implementation.name, []).append(op)
    return [f"ops          {name}: {', '.join(names)}" for name, names in by_name.items()]


def matmul_lines(decoder: Decoder) -> list[str]:
    """Which kernels multiply with which weights, by number of rows."""
    counts: dict[tuple[str, str], int] = {}
    for linear in linears(decoder.weights, decoder.spec.num_layers):
        matmul = linear.matmul(decoder.weights.dtype)
        kind = matmul.need.name, matmul.describe()
        counts[kind] = counts.get(kind, 0) + 1
    several = len(counts) > 1
    lines = [f"matmul       {name}{f' ({n})' if several else ''}: {how}" for (name, how), n in counts.items()]
    gating = dict.fromkeys(matmul.describe_gated() for matmul in _gate_ups(decoder))
    return lines + [f"matmul       {how}" for how in gating if how]


def _gate_ups(decoder: Decoder) -> list[Matmul]:
    mlps = [decoder.weights.peek(index).mlp for index in range(decoder.spec.num_layers)]
    dense = [one if isinstance(one, MLPWeights) else one.shared for one in mlps]
    return [one.gate_up.matmul(decoder.weights.dtype) for one in dense if one is not None]


def passed_over(decoder: Decoder) -> list[str]:
    """What this model would use, were it not for the device, the release of Triton, its dtypes or its sizes."""
    weights, spec = decoder.weights, decoder.spec
    found = decoder.ops.passed_over(weights.device, weights.dtype, with_moe=spec.moe is not None)
    for linear in linears(weights, spec.num_layers):
        matmul = linear.matmul(weights.dtype)
        found += [f"{matmul.need.name}, {line}" for line in matmul.passed_over]
    found += [line for matmul in _gate_ups(decoder) for line in matmul.gating_passed_over]
    return list(dict.fromkeys(found))
