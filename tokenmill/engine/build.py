"""Builds an engine from a config: finds the model, plans memory, loads weights, and joins the parts."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tokenmill.collector import collector_paused
from tokenmill.config import EngineConfig
from tokenmill.engine.checkpoints import Progress, load, load_tokenizer, open_checkpoint
from tokenmill.engine.choices import hardware_of, linear_shapes, model_bytes, schemes_for
from tokenmill.engine.core import Engine
from tokenmill.engine.kernels import start_compiler, warm_up_kernels
from tokenmill.engine.runner.guard import PrecisionGuard
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.batching import BATCHING
from tokenmill.engine.scheduler.control import pace_for
from tokenmill.engine.scheduler.policy import POLICIES
from tokenmill.engine.speculation.choose import draft_model_for, speculation_for
from tokenmill.engine.speculation.draft_model import DraftModel
from tokenmill.engine.speculation.proposer import MAX_DRAFTS
from tokenmill.errors import ConfigError
from tokenmill.kv.manager import KVManager
from tokenmill.model.decoder import Decoder
from tokenmill.model.families import spec_from_config
from tokenmill.model.layers import MLPWeights, linears
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights.checkpoint import GroupCheckpoint
from tokenmill.model.weights.source import ModelFiles, resolve
from tokenmill.ops.device_facts import outdated
from tokenmill.ops.kv_forms import KV_FORMS, form_for
from tokenmill.ops.matmul import Matmul
from tokenmill.ops.native.library import LEVEL_NAMES, Library
from tokenmill.ops.native.library import load as load_native
from tokenmill.ops.registry import Need, Ops, select
from tokenmill.plan.solve.settings import SolvedSettings, solve
from tokenmill.quant.schemes.choose import ComputeTarget, describe
from tokenmill.quant.schemes.dense import InvariantDense
from tokenmill.quant.schemes.scheme import Schemes
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
    device = choose_device(config.device)
    waking = threading.Thread(target=_wake, args=(device,), daemon=True)
    waking.start()  # a GPU's driver takes a while, during which Triton can be imported
    compiler = start_compiler(config, device)
    try:
        with collector_paused():
            return _build(config, device, compiler, tell)
    finally:
        waking.join()
        if compiler is not None:
            compiler.close()


def _wake(device: torch.device) -> None:
    """Have a GPU's driver make its context, and the library of products load itself."""
    if device.type != "cuda":
        return
    with contextlib.suppress(RuntimeError):  # whoever uses it next is told
        square = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        torch.mm(square, square)


def _build(config: EngineConfig, device: torch.device, compiler: KernelCompiler | None, tell: Progress) -> Built:
    files = resolve(config.model, progress=tell, cache_dir=config.cache_dir)
    checkpoint, model_config = open_checkpoint(config, files)
    spec = spec_from_config(model_config)
    dtype, dtype_why = choose_dtype(config.dtype, spec, device)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(files, checkpoint)
    native = native_for(config, dtype, device, tell)
    slower = why_slower(native, config, device)
    target = ComputeTarget(device, dtype, isinstance(native, Library))
    schemes, schemes_why = schemes_for(config, spec, checkpoint, target)
    check_kv_form(config.kv_cache_dtype, spec)
    kv_dtype, kv_why = choose_kv_dtype(config.kv_cache_dtype, dtype, schemes, device)
    narrow = dtype in (torch.float16, torch.bfloat16) and not config.batch_invariant
    guarded = narrow and config.adaptive_precision
    sizes = model_bytes(spec, dtype, schemes, checkpoint, kv_dtype, guarded)
    draft = draft_model_for(config, spec, tokenizer, target, kv_dtype, tell)
    sizes = sizes if draft is None else draft.beside(sizes)
    settings = solve(config, sizes, spec.max_positions, hardware_of(device))
    kv_form = form_for(kv_dtype)
    kv_name = kv_form.name if kv_form else str(kv_dtype).removeprefix("torch.")
    need = Need(
        device.type,
        dtype,
        spec.attention_head_dim,
        settings.block_size,
        config.batch_invariant,
        kv_form.name if kv_form else None,
    )
    ops = select(need, config.ops)
    weights = load(config, spec, checkpoint, dtype, device, schemes, tell)
    if config.batch_invariant:  # logits in float32: of equal ones, which is ranked first could depend on the batch
        weights.lm_head = replace(weights.lm_head, scheme=InvariantDense(torch.float32))
    decoder = Decoder(spec, weights, ops, max_len=settings.max_len)
    # The engine of a server has no tokenizer until it needs one for a grammar.
    grammars = Grammars(lambda: tokenizer or load_tokenizer(files, None), spec.eos_ids)
    guard = PrecisionGuard(decoder, need, settings.max_len) if guarded else None
    engine, drafts = join(config, settings, decoder, kv_dtype, device, grammars, guard, draft)
    warmed = [] if compiler is None else warm_up_kernels(compiler, engine, settings, tell)
    report = [
        f"model        {files.name} ({spec.architecture}, {spec.num_layers} layers)",
        f"device       {device}, {str(dtype).removeprefix('torch.')} ({dtype_why})",
        f"linear       {describe(schemes, linear_shapes(spec))} ({schemes_why})",
        *(f"weights      {note}" for note in (checkpoint.notes() if isinstance(checkpoint, GroupCheckpoint) else [])),
        *_native_lines(native, slower, device),
        f"kv cache     {kv_name} ({kv_why})",
        *settings.memory.lines(settings.num_blocks * settings.block_size),
        *settings.reasons,
        f"speculation  {drafts}",
        *_ops_lines(ops),
        *warmed,
        *matmul_lines(decoder),
        *(f"passed over  {line}" for line in passed_over(decoder)),
    ]
    return Built(engine, tokenizer, spec, settings, files, report, slower)


def join(
    config: EngineConfig,
    settings: SolvedSettings,
    decoder: Decoder,
    kv_dtype: torch.dtype,
    device: torch.device,
    grammars: Grammars | None = None,
    guard: PrecisionGuard | None = None,
    draft: DraftModel | None = None,
) -> tuple[Engine, str]:
    """Scheduler, KV and runner around a decoder, and how drafts are made."""
    state = DeviceState(
        decoder.spec,
        max_rows=settings.max_rows,
        max_len=settings.max_len,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        dtype=kv_dtype,
        device=device,
        native=all(decoder.ops.chosen[op].name == "native" for op in ("rope_kv_write", "attention")),
    )
    if not config.enable_chunked_prefill and settings.max_step_tokens < settings.max_len:
        raise ConfigError(
            f"enable_chunked_prefill is off, so max_num_batched_tokens ({settings.max_step_tokens}) has to be at least "
            f"max_model_len ({settings.max_len}): raise the first, or lower the second"
        )
    limits = Limits(
        max_rows=settings.max_rows,
        max_step_tokens=settings.max_step_tokens,
        max_verified=min(1 + MAX_DRAFTS, settings.max_step_tokens),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        float32_retry=guard is not None,
        whole_prompts=not config.enable_chunked_prefill,
        reserved_tokens=settings.max_len if config.kv_reservation == "max_model_len" else 0,
    )
    batching = BATCHING[config.batching](kv_cache=config.kv_cache)
    scheduler = Scheduler(
        limits,
        KVManager(settings.num_blocks, settings.block_size, config.enable_prefix_caching and batching.may_share),
        POLICIES[config.policy](),
        pace=pace_for(limits, config.slo_itl_ms, config.slo_ttft_ms),
        batching=batching,
        find_shared_prefixes=config.shared_prefix_attention
        and not config.batch_invariant
        and device.type == "cuda"
        and None in decoder.spec.windows,
    )
    matmuls = (one.matmul(decoder.weights.dtype) for one in linears(decoder.weights, decoder.spec.num_layers))
    recordable = decoder.ops.capture_safe(with_moe=decoder.spec.moe is not None) and all(
        matmul.recordable for matmul in matmuls
    )
    graphs = config.cuda_graphs and recordable
    runner = TorchRunner(
        decoder,
        state,
        max_rows=settings.max_rows,
        max_verified=limits.max_verified,
        max_tokens=settings.max_step_tokens,
        graphs=graphs,
        prompt_graphs=graphs and config.prompt_graphs,
        guard=guard,
    )
    runner.reserve(settings.memory.activations)
    # A CPU computes a step while launching it: to be a step behind would only hold answers back.
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    speculation, why = speculation_for(config, runner, graphs, max(settings.max_rows, limits.max_verified), draft)
    return Engine(scheduler, runner, overlap=overlap, grammars=grammars, speculation=speculation), why


def choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {wanted!r} but torch sees no GPU; use device='cpu' or a CUDA build of torch")
    return device


def choose_dtype(wanted: str, spec: DecoderSpec, device: torch.device) -> tuple[torch.dtype, str]:
    if wanted != "auto":
        return getattr(torch, wanted), "as set"
    if device.type == "cpu":
        return torch.float32, "the fastest that every CPU computes exactly"
    if spec.dtype in ("bfloat16", "float16"):
        return getattr(torch, spec.dtype), "as the checkpoint was saved"
    return torch.bfloat16, "half the bytes of float32"


def choose_kv_dtype(wanted: str, dtype: torch.dtype, schemes: Schemes, device: torch.device) -> tuple[torch.dtype, str]:
    if wanted == "auto":
        if schemes.default.kv_dtype is not None and not schemes.exact:
            return schemes.default.kv_dtype, "half the bytes to read, and far finer than the packed weights"
        return dtype, "as the model computes"
    if wanted in KV_FORMS:
        return KV_FORMS[wanted].dtype, "as set; codes with scales of their own for every token and head"
    chosen: torch.dtype = getattr(torch, wanted)
    if device.type != "cpu" and chosen != dtype:
        raise ConfigError(
            f"kv_cache_dtype is {wanted!r}, but the model computes in {str(dtype).removeprefix('torch.')}, and a GPU's "
            f"KV cache has to be the same, or one of {', '.join(KV_FORMS)}; leave it out"
        )
    return chosen, "as set"


def check_kv_form(wanted: str, spec: DecoderSpec) -> None:
    """Refuse a quantized cache for a model that cannot have it."""
    if wanted not in KV_FORMS:
        return
    if spec.mla is not None:
        raise ConfigError(
            f"kv_cache_dtype is {wanted!r}, but {spec.architecture} caches a latent that keys and values share, which "
            "is kept in floats; leave it out"
        )
    KV_FORMS[wanted].check(spec.head_dim)


def native_for(config: EngineConfig, dtype: torch.dtype, device: torch.device, tell: Progress) -> Library | str | None:
    """The native library for a model on a CPU, built first where it must be; why not, or None where nobody asked."""
    if device.type != "cpu" or dtype != torch.float32 or config.ops not in (None, "native") or config.batch_invariant:
        return None
    native = load_native(tell, config.cache_dir)
    if isinstance(native, Library):
        native.threads = torch.get_num_threads()
    return native


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
    mlps = [decoder.weights.layer(index).mlp for index in range(decoder.spec.num_layers)]
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
