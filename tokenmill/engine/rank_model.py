"""What one rank computes with: files, plan and weights of its part of a model, and the runners made from these.

An engine of one rank is built of it (`build.py`), and so is every other rank of a group, in a process of its own
(`ranks/rank.py`): config and layout say what a rank's part is, and sizes are what rank 0 has solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from tokenmill.config import EngineConfig, parse_experts
from tokenmill.engine.adapter_room import adapter_slots
from tokenmill.engine.checkpoints import Progress, load, load_cached, load_streamed, open_checkpoint
from tokenmill.engine.choices import (
    check_kv_form,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    model_bytes,
    native_for,
    schemes_for,
)
from tokenmill.engine.pruning import pruner_for, pruning_for
from tokenmill.engine.rank_parts import fullest, schemes_of_part
from tokenmill.engine.runner.data_rank import DataRank
from tokenmill.engine.runner.guard import PrecisionGuard
from tokenmill.engine.runner.stage import LastStage, Pipe, StageRunner
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.proposer import MAX_DRAFTS
from tokenmill.engine.step import Runner
from tokenmill.errors import ConfigError
from tokenmill.model.adapters.slots import AdapterSlots
from tokenmill.model.decoder import Decoder
from tokenmill.model.experts import ExpertLimits
from tokenmill.model.families import spec_from_config
from tokenmill.model.layers import WeightStore
from tokenmill.model.shard import shard_of, spec_of
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.stage import stages_of
from tokenmill.model.weights.checkpoint import Checkpoint
from tokenmill.model.weights.source import ModelFiles, resolve
from tokenmill.ops.kv_forms import form_for
from tokenmill.ops.native.library import Library
from tokenmill.ops.registry import Need, Ops, select
from tokenmill.parallel.communicator import Communicator
from tokenmill.parallel.compressed import CompressedSums
from tokenmill.parallel.layout import Layout, parse_layout
from tokenmill.plan.solve.memory import MemoryPlan, ModelBytes
from tokenmill.plan.solve.offload import CachedExperts, StreamedLayers
from tokenmill.plan.solve.settings import SolvedSettings
from tokenmill.quant.schemes.choose import ComputeTarget
from tokenmill.quant.schemes.scheme import Schemes


@dataclass(frozen=True)
class Prepared:
    """What is known before sizes are solved and anything is loaded."""

    device: torch.device
    files: ModelFiles
    checkpoint: Checkpoint | None
    spec: DecoderSpec
    dtype: torch.dtype
    dtype_why: str
    native: Library | str | None
    schemes: Schemes
    schemes_why: str
    kv_dtype: torch.dtype
    kv_why: str
    guarded: bool  # rows that a narrow dtype cannot compute are computed in float32
    stages: tuple[DecoderSpec, ...]  # of a pipeline; the spec itself where there is none
    stage: int  # the rank's

    @property
    def part(self) -> DecoderSpec:
        """What the rank has of the model."""
        return self.stages[self.stage]

    @property
    def sizes(self) -> ModelBytes:
        """Bytes of the fullest rank."""
        schemes = [schemes_of_part(self.schemes, one) for one in self.stages]
        found = [
            model_bytes(one, self.dtype, its, self.checkpoint, self.kv_dtype, self.guarded)
            for one, its in zip(self.stages, schemes, strict=True)
        ]
        return fullest(found)

    @property
    def target(self) -> ComputeTarget:
        return ComputeTarget(self.device, self.dtype, isinstance(self.native, Library))

    @property
    def kv_name(self) -> str:
        form = form_for(self.kv_dtype)
        return form.name if form else str(self.kv_dtype).removeprefix("torch.")


def prepare(
    config: EngineConfig, device: torch.device, tell: Progress, threads: int | None = None, rank: int = 0
) -> Prepared:
    """`threads`: that a rank has of a CPU, where it is not alone."""
    if threads is not None:
        torch.set_num_threads(threads)
    files = resolve(config.model, progress=tell, cache_dir=config.cache_dir)
    checkpoint, model_config = open_checkpoint(config, files)
    layout = parse_layout(config.parallel)
    spec = _rank_spec(config, spec_from_config(model_config), layout, rank)
    dtype, dtype_why = choose_dtype(config.dtype, spec, device)
    native = native_for(config, dtype, device, tell)
    target = ComputeTarget(device, dtype, isinstance(native, Library))
    schemes, schemes_why = schemes_for(config, spec, checkpoint, target)
    check_kv_form(config.kv_cache_dtype, spec)
    kv_dtype, kv_why = choose_kv_dtype(config.kv_cache_dtype, dtype, schemes, device)
    narrow = dtype in (torch.float16, torch.bfloat16) and not config.batch_invariant
    guarded = narrow and config.adaptive_precision and threads is None
    return Prepared(
        device,
        files,
        checkpoint,
        spec,
        dtype,
        dtype_why,
        native,
        schemes,
        schemes_why,
        kv_dtype,
        kv_why,
        guarded,
        tuple(stages_of(spec, layout.pp)),
        layout.coordinates(rank)[0],
    )


def _rank_spec(config: EngineConfig, spec: DecoderSpec, layout: Layout, rank: int) -> DecoderSpec:
    """What a rank has of every layer, as the settings have it."""
    hot, capacity = parse_experts(config.hot_experts), config.expert_capacity
    if layout.dp > 1 and layout.pp > 1:
        raise ConfigError(
            f"parallel is {config.parallel!r}, but the ranks of a pipeline have the same requests; leave dp out, or pp"
        )
    if hot and layout.ep == 1:
        raise ConfigError(
            f"hot_experts is {config.hot_experts!r}, but no rank lacks any expert; divide whole ones (parallel='ep2'), "
            "or leave it out"
        )
    if config.allreduce_8bit_above is not None and (layout.tp == 1 or config.batch_invariant):
        why = "no ranks divide heads (tp)" if layout.tp == 1 else "batch_invariant is set, which promises the exact sum"
        raise ConfigError(f"allreduce_8bit_above is {config.allreduce_8bit_above}, but {why}; leave it out")
    if capacity is not None and (spec.moe is None or config.batch_invariant):
        why = f"{spec.architecture} has no experts" if spec.moe is None else "batch_invariant is set, which it breaks"
        raise ConfigError(f"expert_capacity is {capacity:g}, but {why}; leave it out")
    return spec_of(spec, shard_of(layout, rank), hot)


class RankRunner(Runner, Protocol):
    """What computes a rank's part of steps."""

    @property
    def decoder(self) -> Decoder: ...


@dataclass(frozen=True)
class RankModel:
    """Weights, loaded once; every generation of a group makes another runner over them, with empty memory."""

    config: EngineConfig
    settings: SolvedSettings
    prepared: Prepared
    weights: WeightStore
    ops: Ops
    need: Need  # what the ops were chosen for
    adapters: AdapterSlots | None = None

    @property
    def native_kv(self) -> bool:
        """Whether the native library reads and writes keys and values."""
        return all(self.ops.chosen[op].name == "native" for op in ("rope_kv_write", "attention"))

    def records(self, decoder: Decoder) -> bool:
        """Whether steps are recorded. Beside weights that come from the host they are not: launching a layer takes a
        GPU's host far less time than its copy does, and which experts it chose has to be asked.
        """
        memory = self.settings.memory
        copied = bool(memory.streamed.layers or memory.cached.slots) and self.prepared.device.type == "cuda"
        return self.config.cuda_graphs and not copied and decoder.recordable

    def runner(
        self,
        communicator: Communicator | None = None,
        every: Communicator | None = None,
        kv_memory: torch.Tensor | None = None,
        *,
        hidden_is_read: bool = False,
    ) -> RankRunner:
        """`communicator`: to the ranks that have the other parts of its layers; every: to all ranks, for a pipeline,
        or where ranks have requests of their own; kv_memory: where its keys and values lie; hidden_is_read: by a head,
        after every step.
        """
        config, settings, made = self.config, self.settings, self.prepared
        layout = parse_layout(config.parallel)
        part, alone = made.part, communicator is None or communicator.size == 1
        others = every if layout.dp > 1 and layout.ep > 1 else None
        if communicator is not None and config.allreduce_8bit_above is not None:
            communicator = CompressedSums(communicator, config.allreduce_8bit_above)
        decoder = Decoder(part, self.weights, self.ops, settings.max_len, None if alone else communicator, others)
        decoder.expert_limits = ExpertLimits(config.expert_capacity)
        if part.moe is not None and (config.expert_capacity is not None or layout.ep > 1):
            decoder.count_experts()
        state = DeviceState(
            part,
            max_rows=settings.max_rows,
            max_len=settings.max_len,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            dtype=made.kv_dtype,
            device=made.device,
            native=self.native_kv,
            memory=kv_memory,
            pruned=config.kv_pruning is not None,
        )
        graphs = self.records(decoder) and others is None  # the host hears how many tokens come
        prompt_graphs = config.prompt_graphs and not hidden_is_read  # pieces leave nothing for it
        if (above := config.allreduce_8bit_above) is not None:  # recordings add up alike however many tokens there are
            largest = max(settings.max_rows, most_verified(settings)) * part.hidden * made.dtype.itemsize
            graphs, prompt_graphs = graphs and largest < above, False
        pipe = None if every is None or part.stage is None else Pipe(every, len(made.stages))
        if pipe is not None and not part.has_head:
            rows, tokens = settings.max_rows, settings.max_step_tokens
            recorded = graphs and made.device.type == "cpu"
            stage = StageRunner(decoder, state, pipe, max_rows=rows, max_tokens=tokens, graphs=recorded)
            if self.adapters is not None:
                stage.serve_adapters(self.adapters.updates)
            return stage
        runner = TorchRunner(
            decoder,
            state,
            max_rows=settings.max_rows,
            max_verified=most_verified(settings),
            max_tokens=settings.max_step_tokens,
            graphs=graphs,
            prompt_graphs=graphs and prompt_graphs,
            guard=PrecisionGuard(decoder, self.need, settings.max_len) if made.guarded else None,
        )
        if self.adapters is not None:
            runner.serve_adapters(self.adapters.updates)
        runner.reserve(settings.memory.activations)
        if (pruning := pruning_for(config, settings.block_size, part)) is not None:
            runner.pruner = pruner_for(pruning, decoder, state)
        if every is not None and layout.dp > 1:
            return DataRank(runner, every, layout)
        return runner if pipe is None else LastStage(runner, pipe)


def rank_model(
    config: EngineConfig, rank: int, settings: SolvedSettings, tell: Progress, threads: int | None = None
) -> RankModel:
    """The part that a rank has of the model."""
    return load_model(config, settings, prepare(config, choose_device(config.device), tell, threads, rank), tell)


def load_model(config: EngineConfig, settings: SolvedSettings, prepared: Prepared, tell: Progress) -> RankModel:
    part, kv_form = prepared.part, form_for(prepared.kv_dtype)
    need = Need(
        prepared.device.type,
        prepared.dtype,
        part.attention_head_dim,
        settings.block_size,
        config.batch_invariant,
        kv_form.name if kv_form else None,
    )
    # The native library's ops are invariant, too, and who computes without it gets torch's.
    native = config.batch_invariant and isinstance(prepared.native, Library)
    ops = select(need, config.ops or ("native" if native else None))
    schemes = schemes_of_part(prepared.schemes, part)
    what = config, part, prepared.checkpoint, prepared.dtype, prepared.device, schemes, tell
    away, cached = settings.memory.streamed, settings.memory.cached
    if away.layers:
        weights: WeightStore = load_streamed(*what, away, prepared.files, sum(prepared.sizes.layers))
    elif cached.slots:
        weights = load_cached(*what, cached, prepared.files)
    else:
        weights = load(*what)
    if part.has_head:
        weights.lm_head = replace(weights.lm_head, scheme=weights.lm_head.scheme.of_head())
    return RankModel(config, settings, prepared, weights, ops, need, adapter_slots(config, prepared, ops))


def most_verified(settings: SolvedSettings) -> int:
    """Tokens of a step that only decodes, drafts included."""
    return min(1 + MAX_DRAFTS, settings.max_step_tokens)


def settings_text(settings: SolvedSettings) -> dict[str, Any]:
    """For another process; `settings_from` reads it."""
    return asdict(settings)


def settings_from(text: Mapping[str, Any]) -> SolvedSettings:
    streamed, cached = StreamedLayers(**text["memory"]["streamed"]), CachedExperts(**text["memory"]["cached"])
    memory = {**text["memory"], "streamed": streamed, "cached": cached}
    return SolvedSettings(**{**text, "memory": MemoryPlan(**memory), "reasons": tuple(text["reasons"])})
