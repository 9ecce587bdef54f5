"""TorchRunner: computes steps with torch on one device, and never waits for it on the way to the next launch."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.engine.runner.capture import Capture
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.engine.runner.drafters import Drafter, TreeDrafter
from tokenmill.engine.runner.guard import PrecisionGuard
from tokenmill.engine.runner.inputs import pack
from tokenmill.engine.runner.paths import (
    DecodePath,
    FeatureReader,
    ForwardPath,
    GuardedForward,
    PlainForward,
    PreparedStep,
    attention_batch,
)
from tokenmill.engine.runner.piecewise import PieceGraphs, tokens_worth_recording
from tokenmill.engine.runner.placing import place_modules
from tokenmill.engine.runner.pooling import Pooled, Pooler
from tokenmill.engine.runner.pruner import Pruner
from tokenmill.engine.runner.recordings import TREE_ROWS, WIDTHS, Kind
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.verify import COLUMNS, REJECTED, settled
from tokenmill.engine.step import Pending, Step, StepResult, is_speculative
from tokenmill.model.decoder import Decoder
from tokenmill.model.experts import ExpertLoad
from tokenmill.model.shard import vocabulary
from tokenmill.ops.types import DecodeInputs
from tokenmill.quant.schemes.adapters import LowRankUpdates
from tokenmill.sampling.logprobs import Widths, unpack
from tokenmill.sampling.records import TokenLogprobs
from tokenmill.sampling.sampler import Sampled, Sampler
from tokenmill.sampling.settings import Traits
from tokenmill.sampling.vocab_parts import VocabPart

if TYPE_CHECKING:
    from tokenmill.engine.runner.cpu_decode_graph import RecordedDecode
    from tokenmill.engine.runner.cpu_prompt_graphs import RecordedChunks

# Devices that run behind the host: rows stand where they say, and attention sees drafts as rows of one query each that
# stand there. Elsewhere a step is computed while it is launched, and the host knows.
ASYNC_DEVICES = {"cuda"}

# Memory that is reserved
SMALL, SMALL_COUNT = 1 << 20, 32  # torch keeps tensors of up to so many bytes apart; how many there may be
LEAST_STAGED = 9  # the smallest pinned piece has two to the power of so many bytes
STAGED_AT_ONCE = 12  # copies of one size that are on their way


def vocab_part(decoder: Decoder) -> VocabPart | None:
    """Which tokens' logits a rank has."""
    spec, ranks = decoder.spec, decoder.ranks
    if spec.part is None or ranks is None:
        return None
    size = spec.part.ranks
    parts = tuple(vocabulary(spec.vocab_size, rank, size) for rank in range(size))
    return VocabPart(spec.part.vocab, parts, ranks, decoder.ops.batch_invariant)


class TorchRunner:
    """One rank. Sampled tokens are written to the device's token table, where the next step finds them."""

    def __init__(
        self,
        decoder: Decoder,
        state: DeviceState,
        *,
        max_rows: int,
        max_tokens: int,  # of a step
        max_verified: int = 0,  # tokens of a step that only decodes, drafts included; never fewer than max_rows
        graphs: bool = False,  # decode steps are recorded
        prompt_graphs: bool = False,  # and so are steps that read prompts
        guard: PrecisionGuard | None = None,  # for rows that a narrow dtype cannot compute
        sampler: Sampler | None = None,  # another runner's, whose rows these are, too
    ) -> None:
        self.decoder = decoder
        self.state = state
        self.device = state.tokens.device
        self._max_rows, self.max_tokens = max_rows, max_tokens
        self._activations = 0  # bytes that are reserved
        at_once = max(max_rows, max_verified)  # tokens of a step that only decodes
        self.sampler = sampler or Sampler(
            decoder.ops,
            max_rows,
            decoder.spec.vocab_size,
            self.device,
            state.tokens,
            at_once,
            vocab_part(decoder),
        )
        self._pooler = Pooler()
        self.decode_paths: list[DecodePath] = []
        self.forward_paths: list[ForwardPath] = [PlainForward(decoder, state)]
        self.beside: TorchRunner | None = None  # launches steps of another model between those of this one
        self.feature_reader: FeatureReader | None = None
        self.pruner: Pruner | None = None  # chooses and moves what survives, where requests are pruned
        self.expects_drafts = False  # steps that verify drafts are got ready before the first request
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        self._recorded: RecordedDecode | None = None
        self._adapted: RecordedDecode | None = None  # of rows with adapters
        self._chunks: RecordedChunks | None = None
        if graphs and self.device.type == "cuda":
            self._graphs = DecodeGraphs(decoder, state, self.sampler, at_once)
            self.decode_paths.append(self._graphs)
            if prompt_graphs:
                most = tokens_worth_recording(decoder.spec, max_tokens)
                self._pieces = PieceGraphs(decoder, state, most, Capture(self.device))
                self.forward_paths.insert(0, self._pieces)
        elif graphs:
            from tokenmill.engine.runner.cpu_decode_graph import RecordedDecode
            from tokenmill.engine.runner.cpu_prompt_graphs import RecordedChunks

            self._recorded = RecordedDecode(decoder, state, self.sampler, at_once)
            self.decode_paths.append(self._recorded)
            if prompt_graphs:
                self._chunks = RecordedChunks(decoder, state, max_rows, max_tokens)
                self.forward_paths.insert(0, self._chunks)
        if guard is not None:
            self.forward_paths.insert(0, GuardedForward(decoder, state, guard))

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        # The current device belongs to the thread, and streams, events and kernels follow it.
        with self.on_device():
            if step.slack and self.device.type not in ASYNC_DEVICES:
                step = settled(step, self.state.lengths.tolist())
            if step.compactions:
                assert self.pruner is not None
                self.pruner.compact(step.compactions)
            self.sampler.take_masks(step.masks)
            for path in self.decode_paths:
                if path.takes(step) and (sampled := path.run(step)) is not None:
                    rows = step.rows
                    if sampled.logprobs is not None and (step.drafts or sampled.stride > 1):
                        counts = step.counts if sampled.stride == 1 else [sampled.stride] * len(rows)
                        rows = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
                    return _TorchPending(step, self.device, self.sampler, sampled, rows)
            return self._launch_prepared(step)

    def draft_with(self, drafter: Drafter, trees: TreeDrafter | None = None, runner: TorchRunner | None = None) -> None:
        """Have the device draft at the end of steps that say so; runner: of a model that does, and reads for that."""
        self.beside = runner
        if self._graphs is not None:
            self._graphs.drafter, self._graphs.tree_drafter = drafter, trees

    def read_with(self, reader: FeatureReader) -> None:
        """Have it read features of every step."""
        self.feature_reader = reader
        if self._graphs is not None:
            self._graphs.feature_layers = reader.layers
        for recorded in (self._recorded, self._adapted):
            if recorded is not None:
                recorded.feature_reader = reader

    def serve_adapters(self, updates: Mapping[str, LowRankUpdates]) -> None:
        """Have rows name adapters. Steps in which some do are recorded apart from the others, which pay nothing; on a
        GPU they are launched op by op."""
        self.decoder.adapters = updates
        if self._recorded is not None:
            from tokenmill.engine.runner.cpu_decode_graph import RecordedDecode
            from tokenmill.engine.runner.cpu_prompt_graphs import RecordedChunks

            capacity = self._recorded.capacity
            self._adapted = RecordedDecode(self.decoder, self.state, self.sampler, capacity, adapted=True)
            self._adapted.feature_reader = self._recorded.feature_reader
            self.decode_paths.append(self._adapted)
            if self._chunks is not None:
                chunks = RecordedChunks(self.decoder, self.state, self._max_rows, self.max_tokens, adapted=True)
                self.forward_paths.insert(len(self.forward_paths) - 1, chunks)

    @property
    def expert_load(self) -> ExpertLoad | None:
        """How often experts were chosen, where that is counted."""
        return self.decoder.expert_load

    @property
    def drafter(self) -> str:
        """What drafts at the end of steps, as far as kernels go."""
        return self._graphs.drafter.kind if self._graphs is not None and self._graphs.drafter is not None else ""

    @property
    def steps_of(self) -> dict[Kind, int]:
        """Recorded steps so far."""
        return {} if self._graphs is None else self._graphs.steps_of

    @property
    def tree_rows(self) -> int:
        """Up to how many rows may verify trees."""
        return TREE_ROWS if self._graphs is not None and self._graphs.tree_drafter is not None else 0

    @property
    def decode_kinds(self) -> list[Kind]:
        """Kinds of steps that only decode, without those whose rows share a beginning."""
        if not self.expects_drafts:
            return [Kind.PLAIN]
        trees = [Kind.TREES] if self.tree_rows else []
        return [Kind.PLAIN, Kind.DRAFTS, *WIDTHS, *trees]

    @contextlib.contextmanager
    def one_of_each_kind(self) -> Iterator[None]:
        """Inside, steps run few layers, but every op that there is."""
        with contextlib.ExitStack() as stack:
            for one in (self, self.beside):
                if one is not None:
                    stack.enter_context(one.decoder.one_of_each_kind())
            yield

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _launch_prepared(self, step: Step) -> Pending:
        """A step that is not only decodes, or that no decode path takes."""
        step.drafting = False  # only recorded steps draft
        paths = (path for path in self.forward_paths if path.takes(step))
        path = next(paths)
        speculative = is_speculative(step)
        packed = pack(
            step,
            self.state.tokens.shape[1],
            self.state.max_blocks,
            (path.padded(step), self.state.scratch_row),
            self._num_entries(step),
            split_drafts=speculative,
            mask_rows=self.sampler.mask_rows if step.drafts and step.masks else None,
        )
        words = to_device(torch.from_numpy(packed.words), self.device)
        part = {name: words[where] for name, where in packed.sections.items()}
        self.state.write(part["token_at"], part["token_value"], part["block_at"], part["block_value"])
        self.sampler.admit(step.admissions)
        if step.moves:
            self.state.copy_blocks(part["move_from"], part["move_to"])
        if step.placements:
            place_modules(step, self.decoder, self.state)
        drafts = self._place_drafts(part) if speculative else None
        reader = self.feature_reader
        prepared = PreparedStep(
            step,
            self.state,
            part["token_rows"],
            part["positions"],
            part["places"] if step.pruned else part["positions"],
            attention_batch(step, packed, part, self.state),
            part["entries"],
            all_wanted=len(packed.sample_rows) == step.num_tokens,
            sample_rows=packed.sample_rows,
            features=self.decoder.features(reader.layers, step.num_tokens) if reader is not None else None,
            adapters=part.get("adapters"),
        )
        prompts: dict[int, list[_Slice]] = {}
        pooled: Pooled | None = None
        logits: torch.Tensor | None = None
        if step.wants_hidden:
            hidden = path.hidden(prepared)
            prompts = self._prompt_logprobs(path, prepared, hidden)
            pooled = self._pooler.pool(step, hidden)
            logits = path.project(prepared, hidden[prepared.entries], packed.sample_rows)
        while logits is None:
            logits = path.logits(prepared)
            if logits is None:
                path = next(paths)
        sampled: Sampled | None = None
        if packed.sample_rows:
            wanted, traits = logits[: len(packed.sample_rows)], self.sampler.traits(packed.sample_rows)
            at = part["entry_rows"], part["entry_positions"]
            sampled = self.sampler.sample(wanted, *at, traits, part.get("mask_rows"))
            self.state.tokens[at] = sampled.tokens.clamp_min(0).int()  # -1 ends its request at commit
            if drafts is not None:
                self._accept_drafts(part, drafts, sampled)
        if reader is not None:
            reader.read(prepared)
        return _TorchPending(step, self.device, self.sampler, sampled, packed.sample_rows, prompts, pooled)

    def _place_drafts(self, part: dict[str, torch.Tensor]) -> DecodeInputs:
        """Correct where rows stand that decode: only the device may know."""
        told = part["told"].view(COLUMNS, -1)
        inputs = self.decoder.ops.decode_inputs(self.state.decode_tables, *told[:2], (told[2:], part["proposed"]))
        count = len(inputs.rows)
        ahead = inputs.positions - part["positions"][:count]
        part["positions"][:count] += ahead
        part["entry_positions"][:count] += ahead
        part["context"][:count] += ahead
        return inputs

    def _accept_drafts(self, part: dict[str, torch.Tensor], inputs: DecodeInputs, sampled: Sampled) -> None:
        told = part["told"].view(COLUMNS, -1)
        said = sampled.tokens[: len(inputs.rows)]
        self.decoder.ops.keep_sampled(self.state.decode_tables, told[0], inputs, said, told[2], REJECTED)
        sampled.mark_rejected()

    def _num_entries(self, step: Step) -> int:
        """For how many tokens logits are computed: as many as some step that only decodes has, so sizes are few.

        A library's products load a kernel when they first need it, and wait for everything that runs before they do:
        with any number of tokens, a server under load met such sizes for its first minute and stood still at each.
        """
        count, sizes = sum(step.samples), self.decode_sizes
        few = bool(sizes) and 0 < count <= sizes[-1] and count < step.num_tokens
        if not few or step.in_float32 or step.prompt_logprobs:
            return count
        return sizes[bisect_left(sizes, count)]

    @torch.inference_mode()
    def rehearse(self, step: Step) -> None:
        """Run a step of rows that belong to nobody, plainly: what it leaves behind is for `end_rehearsal`."""
        pieces = self._pieces
        if pieces is not None:
            pieces.resting = True
        try:
            with self.on_device():
                self._launch_prepared(step)
        finally:
            if pieces is not None:
                pieces.resting = False

    @torch.inference_mode()
    def rehearse_decode(self, rows: int, kind: Kind, traits: Traits = Traits()) -> None:  # noqa: B008
        """The same of a step in which so many rows decode, which is recorded otherwise."""
        if self._graphs is not None:
            with self.on_device():
                self._graphs.rehearse(rows, traits, kind)

    @torch.inference_mode()
    def record_decode(self, rows: int, traits: Traits, kind: Kind) -> None:
        """Record a step in which so many rows decode, after its parts have been rehearsed."""
        if self._graphs is not None:
            with self.on_device():
                self._graphs.record_ahead(rows, traits, kind)

    @torch.inference_mode()
    def rehearse_sampling(self, rows: int, dtype: torch.dtype, traits: Traits) -> None:
        """The same of the end of a step."""
        with self.on_device():
            logits = torch.zeros(rows, self.decoder.spec.vocab_rows, dtype=dtype, device=self.device)
            self.sampler.rehearse(logits, traits)

    def end_rehearsal(self) -> None:
        """Rows and blocks are as new, and nothing that a step may launch is."""
        self.state.tokens.zero_()
        for recorded in (self._graphs, self._pieces):
            if recorded is not None:
                recorded.recordings.warm = True
        self.close()  # ready means that the device is idle, too

    @property
    def decode_sizes(self) -> list[int]:
        """Numbers of rows at which steps that only decode are run."""
        return self._graphs.recordings.sizes if self._graphs is not None else []

    @property
    def piece_sizes(self) -> list[int]:
        """Numbers of tokens at which other steps are recorded."""
        return self._pieces.recordings.sizes if self._pieces is not None else []

    def reset(self) -> None:
        """Wait for what is in flight to end, one way or the other, and return cached memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self.reserve(self._activations)

    def reserve(self, activations: int) -> None:
        """Take the memory of the largest step (bytes of activations, and pinned pieces for what the host sends): asking
        a GPU's driver waits for all running work, and torch cuts every later tensor out of what it was given. A server
        that met its largest steps one by one stood still for 50 to 300 ms at each of them.
        """
        self._activations = activations
        if not activations or self.device.type != "cuda":
            return
        with contextlib.suppress(torch.OutOfMemoryError):  # then it is asked for as steps need it
            torch.empty(activations, dtype=torch.uint8, device=self.device)
            _ = [torch.empty(SMALL, dtype=torch.uint8, device=self.device) for _ in range(SMALL_COUNT)]
        staged = 8 * (6 * self.max_tokens + 16 * self._max_rows)  # see `inputs.pack`; cached prefixes need more
        powers = range(LEAST_STAGED, max(LEAST_STAGED, (staged - 1).bit_length()) + 1)
        sizes = [1 << power for power in powers for _ in range(STAGED_AT_ONCE)]
        _ = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _prompt_logprobs(
        self, path: ForwardPath, prepared: PreparedStep, hidden: torch.Tensor
    ) -> dict[int, list[_Slice]]:
        """Log-probabilities of the prompt tokens that follow this step's tokens, a bounded slice at a time."""
        found: dict[int, list[_Slice]] = {}
        step = prepared.step
        first = 0
        for index, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            if row in step.prompt_logprobs:
                width, prompt_len = step.prompt_logprobs[row]
                last = min(start + count, prompt_len - 1)
                for at in range(start, last, self._max_rows):
                    size = min(self._max_rows, last - at)
                    logits = path.project(prepared, hidden[first + at - start :][:size], [row] * size)
                    targets = self.state.tokens[row, at + 1 : at + 1 + size]
                    words = _to_host(self.sampler.prompt_logprobs(logits, targets, width))
                    found.setdefault(index, []).append((words, np.full(size, width, dtype=np.int32)))
            first += count
        return found


_Slice = tuple[torch.Tensor, Widths]  # log-probabilities of a part of a prompt, on their way to the host; best tokens


class _TorchPending:
    """A launched step: the copies of its results are under way."""

    def __init__(
        self,
        step: Step,
        device: torch.device,
        sampler: Sampler,
        sampled: Sampled | None,
        rows: list[int],  # one per sampled position, where there are log-probabilities
        prompts: dict[int, list[_Slice]] | None = None,
        pooled: Pooled | None = None,
    ) -> None:
        self._step, self._prompts, self._pooled = step, prompts or {}, pooled
        self._stride = 1 if sampled is None else sampled.stride
        self._tokens: torch.Tensor | None = None  # [samples], or with log-probabilities [samples, words]
        self._widths: Widths | None = None  # [samples]: best tokens that each asked for, where any asked for them
        if sampled is not None:
            words = sampled.logprobs
            self._widths = None if words is None else sampler.widths(rows)
            self._tokens = _to_host(sampled.tokens if words is None else words)
        self._vectors = _to_host(pooled.vectors) if pooled is not None else None
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if self._tokens is not None and self._widths is not None:
            words = self._tokens.numpy()
            tokens, logprobs = words[:, 0].tolist(), unpack(words, self._widths)
        elif self._tokens is not None:
            tokens = self._tokens.tolist()
        result = StepResult(
            tokens=[],
            prompt_logprobs={
                index: [one for words, widths in parts for one in unpack(words.numpy(), widths) if one is not None]
                for index, parts in self._prompts.items()
            },
        )
        if self._pooled is not None and self._vectors is not None:
            result.pooled = dict(zip(self._pooled.indices, self._vectors.tolist(), strict=True))
        at = 0
        for index, samples in enumerate(self._step.samples):
            held = tokens[at : at + samples]
            if REJECTED in held:
                held = held[: held.index(REJECTED)]
            result.tokens.append(held)
            mine = [one for one in logprobs[at : at + len(held)] if one is not None]
            if mine:
                result.logprobs[index] = mine
            at += samples if self._stride == 1 else self._stride
        return result


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
