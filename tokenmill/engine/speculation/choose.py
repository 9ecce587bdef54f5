"""Which proposers an engine has: what the setting `speculation` says, or what suits the device."""

from __future__ import annotations

import contextlib

import torch

from tokenmill.config import EngineConfig, parse_speculation
from tokenmill.engine.checkpoints import Progress
from tokenmill.engine.runner.torch_runner import ASYNC_DEVICES, TorchRunner
from tokenmill.engine.speculation.device_draft_model import DeviceDraftModel, DeviceDrafts
from tokenmill.engine.speculation.device_eagle import DeviceEagle
from tokenmill.engine.speculation.draft_model import DraftModel, DraftModelProposer
from tokenmill.engine.speculation.eagle import EagleProposer, EagleRunner
from tokenmill.engine.speculation.early_layers import EarlyLayersProposer, early_layers
from tokenmill.engine.speculation.grammar_forced import GrammarProposer
from tokenmill.engine.speculation.head import DeviceHead, HeadProposer
from tokenmill.engine.speculation.head_runner import HeadRunner, MedusaRunner
from tokenmill.engine.speculation.proposer import Proposer, in_background
from tokenmill.engine.speculation.recorded_head import RecordedHead
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.engine.speculation.suffix import SuffixProposer
from tokenmill.errors import ConfigError, ModelError
from tokenmill.model.decoder import Decoder
from tokenmill.model.draft_head import DraftHead, shipped_head, shipped_path
from tokenmill.model.eagle import EagleHead, is_eagle
from tokenmill.model.medusa import MedusaHeads, is_medusa
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.ops.native.library import Library
from tokenmill.ops.native.library import load as load_native
from tokenmill.ops.native.recording import NotRecordableError
from tokenmill.parallel.layout import parse_layout
from tokenmill.quant.schemes.choose import ComputeTarget

UNASKED_ROWS = 4  # that nobody's answer becomes slower with more is not shown, so it is left to those who ask for it
DRAFTERS = ("head", "draft", "layers")  # which compute; at the end of a GPU's step there is room for one of them
# What a token more costs, in shares of a step of one token, before anything was measured
PER_TOKEN = {"cpu": 0.2, "cuda": 0.02}


def draft_model_for(
    config: EngineConfig,
    spec: DecoderSpec,
    tokenizer: Tokenizer | None,
    target: ComputeTarget,
    kv_dtype: torch.dtype,
    tell: Progress,
) -> DraftModel | None:
    """The draft model that is asked for, opened before memory is planned."""
    asked = parse_speculation(config.speculation)
    if target.device.type in ASYNC_DEVICES and sum(kind in DRAFTERS for kind, _ in asked) > 1:
        raise ConfigError(
            f"speculation is {config.speculation!r}, but only one of head, draft and layers drafts on a GPU; leave the "
            "others out"
        )
    paths = [path for kind, path in asked if kind == "draft"]
    if not paths:
        return None
    if len(paths) > 1:
        raise ConfigError(f"speculation is {config.speculation!r}; one draft model is enough, leave the others out")
    return DraftModel.open(config, paths[0], spec, tokenizer, target, kv_dtype, tell)


def eagle_head_for(config: EngineConfig, spec: DecoderSpec) -> EagleHead | None:
    """The EAGLE-3 head that is asked for, loaded before memory is planned."""
    paths = [path for kind, path in parse_speculation(config.speculation) if kind == "head" and is_eagle(path)]
    return EagleHead.load(paths[0], spec) if paths else None


def no_drafts_in_groups(config: EngineConfig) -> str:
    """Why nothing is drafted where steps are made of several: stages have rows of their own in flight, and drafts would
    make steps longer where these fill the pipeline; groups with requests of their own wait for the longest step.
    """
    who = "ranks with requests of their own" if parse_layout(config.parallel).dp > 1 else "stages"
    if config.speculation not in (None, "off"):
        raise ConfigError(
            f"speculation is {config.speculation!r} and parallel {config.parallel!r}, but {who} verify no drafts; "
            "leave one of the two out"
        )
    return f"off ({who} verify no drafts)"


def speculation_for(
    config: EngineConfig,
    runner: TorchRunner,
    recorded: bool,
    max_tokens: int,
    draft: DraftModel | None = None,
    eagle: EagleHead | None = None,
    alone: bool = True,
) -> tuple[Speculation | None, str]:
    """Also says what was chosen and why. `recorded`: steps that only decode are; `max_tokens`: that those may have;
    `alone`: the runner is all there is, and none of several ranks.
    """
    device = runner.device
    if config.speculation == "off":
        return None, "off (as set)"
    if config.kv_pruning is not None:
        return None, "off (rows that are pruned verify no drafts)"
    if config.batching != "continuous" or not config.kv_cache:
        if config.speculation is not None:
            raise ConfigError(
                f"speculation is {config.speculation!r}, but it needs batching='continuous' and kv_cache=True; "
                "leave it out"
            )
        return None, "off (with one of the ways before ours)"
    if config.speculation is None and not recorded:
        return None, "off (steps that verify drafts are not recorded here, and would cost more than they bring)"
    if config.speculation is None and device.type in ASYNC_DEVICES:
        return None, "off (drafts may change how sums are rounded here; speculation='on' turns them on)"
    speculation = Speculation(max_tokens, PER_TOKEN.get(device.type, 0.2))
    speculation.beside = device.type in ASYNC_DEVICES
    runner.expects_drafts = True
    speculation.add(GrammarProposer())
    spec, final_norm = runner.decoder.spec, runner.decoder.weights.final_norm
    if config.speculation in (None, "on"):
        _add_suffix(speculation, config, device)
        shipped = recorded and alone and shipped_path(spec, final_norm) is not None
        if shipped:
            _add_shipped_head(speculation, config, runner, max_tokens)
        when = "where they make answers faster"
        if config.speculation is None:
            speculation.most_rows, when = UNASKED_ROWS, f"while at most {UNASKED_ROWS} requests decode"
        speculation.tree_rows = runner.tree_rows
        return speculation, f"suffix{' and head' if shipped else ''} ({when})"
    names = parse_speculation(config.speculation)
    for kind, path in names:
        if kind == "suffix":
            _add_suffix(speculation, config, device)
        elif kind == "draft":
            assert draft is not None
            speculation.add(_draft_model(config, draft, runner, recorded, max_tokens))
        elif kind == "layers":
            speculation.add(_early_layers(config, path, runner, recorded, max_tokens))
        elif eagle is not None and (recorded or device.type not in ASYNC_DEVICES):
            speculation.add(_eagle(eagle, runner, max_tokens))
        elif recorded:
            speculation.add(_head(_load_head(path, spec, final_norm), runner, max_tokens))
        else:
            raise ConfigError(
                f"speculation is {config.speculation!r}, but a head drafts in recorded steps only: it needs "
                "cuda_graphs, and on a CPU dtype float32 and the native library; use suffix, or leave it out"
            )
    speculation.tree_rows = runner.tree_rows
    kinds = " and ".join("EAGLE-3 head" if eagle is not None and kind == "head" else kind for kind, _ in names)
    return speculation, f"{kinds} (drafts, where they make answers faster)"


def _draft_model(
    config: EngineConfig, draft: DraftModel, runner: TorchRunner, recorded: bool, max_tokens: int
) -> Proposer:
    if runner.device.type not in ASYNC_DEVICES:
        return DraftModelProposer(draft.runner_beside(runner, recorded), runner.max_tokens)
    beside = draft.runner_beside(runner, graphs=False)
    _check_recordable(config, beside.decoder, recorded)
    on_device = DeviceDraftModel(beside, runner.state, _most(runner, max_tokens))
    runner.draft_with(on_device, runner=beside)
    return on_device


def _early_layers(config: EngineConfig, count: str, runner: TorchRunner, recorded: bool, max_tokens: int) -> Proposer:
    if runner.device.type not in ASYNC_DEVICES:
        return EarlyLayersProposer(early_layers(runner, count, recorded), runner.max_tokens)
    _check_recordable(config, runner.decoder, recorded)
    first = early_layers(runner, count, graphs=False)
    on_device = DeviceDrafts("layers", first, runner.state, _most(runner, max_tokens))
    runner.draft_with(on_device)
    return on_device


def _check_recordable(config: EngineConfig, decoder: Decoder, recorded: bool) -> None:
    if not (recorded and decoder.recordable):
        raise ConfigError(
            f"speculation is {config.speculation!r}, but on a GPU models draft in recorded steps only: it needs "
            "cuda_graphs, and kernels that can be recorded for both models; use suffix, or leave it out"
        )


def _most(runner: TorchRunner, max_tokens: int) -> int:
    """Tokens of a step that only decodes, drafts included."""
    return max(max_tokens, len(runner.state.tokens))


def _load_head(path: str, spec: DecoderSpec, final_norm: torch.Tensor) -> DraftHead | MedusaHeads:
    return MedusaHeads.load(path, spec) if is_medusa(path) else DraftHead.load(path, spec, final_norm)


def _head(head: DraftHead | MedusaHeads, runner: TorchRunner, max_tokens: int) -> Proposer:
    decoder = runner.decoder
    native = decoder.ops.chosen["attention"].name == "native"
    ready: HeadRunner | MedusaRunner
    if isinstance(head, MedusaHeads):
        ready = MedusaRunner(head, decoder, runner.sampler, native)
    else:
        ready = HeadRunner(head, decoder, runner.sampler, native, runner.state.kv)
    if runner.device.type in ASYNC_DEVICES:
        on_device = DeviceHead(ready, runner.state, _most(runner, max_tokens))
        branches = on_device.branches and decoder.ops.chosen["attention"].tails
        runner.draft_with(on_device, on_device if branches else None)
        return on_device
    runner.state.keep_hidden(decoder.spec.hidden, decoder.weights.dtype)
    recorded = None
    if native and isinstance(ready, HeadRunner) and isinstance(head, DraftHead):
        with contextlib.suppress(NotRecordableError):  # then neither are decode steps, which say so
            recorded = RecordedHead(ready, decoder, len(head.out_norm), runner.state)
    return HeadProposer(ready, runner.state, runner.sampler, recorded)


def _eagle(head: EagleHead, runner: TorchRunner, max_tokens: int) -> Proposer:
    if runner.device.type in ASYNC_DEVICES:
        on_device = DeviceEagle(head, runner, max(max_tokens, len(runner.state.tokens)))
        runner.draft_with(on_device)
        runner.read_with(on_device)
        return on_device
    proposer = EagleProposer(EagleRunner(head, runner), runner.sampler)
    runner.read_with(proposer)
    return proposer


def _add_shipped_head(speculation: Speculation, config: EngineConfig, runner: TorchRunner, max_tokens: int) -> None:
    """Beside a CPU nobody's first token waits for it: it is loaded when answers go on."""
    decoder = runner.decoder

    def made() -> Proposer:
        head = shipped_head(decoder.spec, decoder.weights.final_norm)
        if head is None:
            raise ModelError("the draft head of this model is not the file that tokenmill came with; install it again")
        return _head(head, runner, max_tokens)

    if config.speculation is None and runner.device.type not in ASYNC_DEVICES:
        runner.state.keep_hidden(decoder.spec.hidden, decoder.weights.dtype)
        speculation.later.append(made)
        return
    try:
        speculation.add(made())
    except ModelError as error:  # it was not asked for by name
        speculation.misses(error)


def _add_suffix(speculation: Speculation, config: EngineConfig, device: torch.device) -> None:
    """The native library is there on a CPU. A GPU's engine does not wait for it: drafts come when it is built."""

    def made() -> Proposer:
        native = load_native(None, config.cache_dir)
        if not isinstance(native, Library):
            raise ConfigError(native)
        return SuffixProposer(native)

    if device.type == "cpu":
        speculation.add(made())
    else:
        speculation.coming.append(in_background(made, waited_for=False))  # a compiler may be at work
