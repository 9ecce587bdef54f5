"""DraftModelProposer: a smaller model with the same tokens writes on, and the engine's model verifies.

Its keys and values lie in the same numbered blocks as those of the model that it drafts for, in an arena of its own: so
one block table serves both, the memory plan counts them together, and a prefix that is found in the cache is there for
both. What it reads wrongly (a block that it has not filled, say) costs drafts, and no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.checkpoints import Progress, load, load_tokenizer, open_checkpoint
from tokenmill.engine.choices import model_bytes, schemes_for
from tokenmill.engine.request import Request
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.engine.speculation.read_records import ReadRecords
from tokenmill.engine.step import Step
from tokenmill.errors import ConfigError, ModelError
from tokenmill.model.decoder import Decoder
from tokenmill.model.families import spec_from_config
from tokenmill.model.layers import WeightStore
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights.source import resolve
from tokenmill.ops.kv_forms import form_for
from tokenmill.ops.registry import Need, select
from tokenmill.plan.solve.memory import ModelBytes
from tokenmill.quant.schemes.choose import ComputeTarget

LENGTH = 5  # tokens that are drafted at most


@dataclass(frozen=True)
class DraftModel:
    """Opened and loaded; what the memory plan and the engine need to know of it."""

    spec: DecoderSpec
    weights: WeightStore
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sizes: ModelBytes
    ops: dict[str, str] | str | None  # that were asked for

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        path: str,
        spec: DecoderSpec,  # of the model that it drafts for
        tokenizer: Tokenizer | None,
        target: ComputeTarget,
        kv_dtype: torch.dtype,
        tell: Progress,
    ) -> DraftModel:
        """Refuses a model that cannot draft for the other."""
        form = "dummy" if config.load_format == "dummy" else "auto"  # files of one format may draft for another's
        own = replace(config, model=path, quantization=None, speculation=None, load_format=form)
        try:
            files = resolve(path, progress=tell, cache_dir=config.cache_dir)
        except ModelError as error:
            said = f"speculation is {config.speculation!r}, but its draft model cannot be found"
            raise ModelError(f"{said}: {error}") from None
        checkpoint, model_config = open_checkpoint(own, files)
        drafter = spec_from_config(model_config)
        said = f"speculation is {config.speculation!r}, but the draft model"
        if drafter.vocab_size != spec.vocab_size:
            known = f"{drafter.vocab_size} tokens, not {spec.vocab_size}"
            raise ConfigError(f"{said} knows {known}; take one of the same family")
        if tokenizer is not None and tokenizer.vocabulary() != load_tokenizer(files, checkpoint).vocabulary():
            raise ConfigError(f"{said} has other tokens; take one with the same tokenizer")
        schemes, _ = schemes_for(own, drafter, checkpoint, target)
        kv_dtype = target.dtype if form_for(kv_dtype) is not None else kv_dtype  # of its own few heads, as they are
        sizes = model_bytes(drafter, target.dtype, schemes, checkpoint, kv_dtype)
        weights = load(own, drafter, checkpoint, target.dtype, target.device, schemes, tell)
        return cls(drafter, weights, target.dtype, kv_dtype, sizes, config.ops)

    def beside(self, sizes: ModelBytes) -> ModelBytes:
        """Of both models, for the memory plan."""
        return replace(
            sizes,
            weights=sizes.weights + self.sizes.weights,
            kv_per_token=sizes.kv_per_token + self.sizes.kv_per_token,
            activation_per_token=max(sizes.activation_per_token, self.sizes.activation_per_token),
            rope_per_position=sizes.rope_per_position + self.sizes.rope_per_position,
            scratch=max(sizes.scratch, self.sizes.scratch),
        )

    def runner_beside(self, runner: TorchRunner, graphs: bool) -> TorchRunner:
        """What computes it: with the tables of the other's rows, and the settings and the noise that they are sampled
        with. What both find likely is then the same token.
        """
        other = runner.state
        need = Need(runner.device.type, self.dtype, self.spec.attention_head_dim, other.block_size)
        decoder = Decoder(self.spec, self.weights, select(need, self.ops), max_len=other.max_len)
        state = DeviceState(
            self.spec,
            max_rows=other.scratch_row,
            max_len=other.max_len,
            num_blocks=other.num_blocks,
            block_size=other.block_size,
            dtype=self.kv_dtype,
            device=runner.device,
            native=all(decoder.ops.chosen[op].name == "native" for op in ("rope_kv_write", "attention")),
        )
        state.tokens, state.block_tables = other.tokens, other.block_tables
        return TorchRunner(
            decoder, state, max_rows=other.scratch_row, max_tokens=runner.max_tokens, graphs=graphs,
            prompt_graphs=graphs, sampler=runner.sampler,
        )  # fmt: skip


class DraftModelProposer:
    """Reads what requests gained, then writes on for a few steps of its own."""

    name = "draft"
    kinds = 1
    on_device = 0

    def __init__(self, runner: TorchRunner, max_tokens: int) -> None:
        self._runner, self._max_tokens = runner, max_tokens  # of one of its steps
        self._block_size = runner.state.block_size
        self._longest = runner.decoder.spec.max_positions
        self._tokens = runner.state.tokens.numpy()
        self._records = ReadRecords(self._block_size)
        self._steps = 0

    def prior(self, kind: int, depth: int) -> float:
        return 0.6

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(requests)
        # The last known token has no place before its step is scheduled, but for the rest of its block.
        rooms = [len(one.blocks) * self._block_size - len(one.tokens) + 1 for one in requests]
        able = [
            i
            for i, one in enumerate(requests)
            if one.pending == 0 and rooms[i] > 0 and not one.in_float32 and len(one.tokens) + LENGTH <= self._longest
        ]
        told = self._read([requests[i] for i in able])
        going = [i for i, token in zip(able, told, strict=True) if token is not None]
        found = {i: [token] for i, token in zip(able, told, strict=True) if token is not None}
        for depth in range(1, min(LENGTH, length)):
            going = [i for i in going if rooms[i] > depth]
            if not going:
                break
            at = [(requests[i].row, len(requests[i].tokens) + depth - 1, 1, 1) for i in going]
            for i, token in zip(going, self._run(at), strict=True):
                found[i].append(token)
        for i, tokens in found.items():
            self._records.of(requests[i]).drafted = tokens[:-1]  # of the last one nothing was computed
            drafts[i] = Draft(tokens, [0] * len(tokens))
        return drafts

    def _read(self, requests: Sequence[Request]) -> list[int | None]:
        """Compute what is new of each request, as far as a step goes; the token behind those that are read whole."""
        left = self._max_tokens - len(requests)
        work: list[tuple[int, int, int, int]] = []  # row, start, count, samples
        for request in requests:
            known, end = self._known(request), len(request.tokens)
            count = min(end - known, max(left, 0) + 1)
            left -= count - 1
            work.append((request.row, known, count, int(known + count == end)))
            # Tokens whose keys and values were found in the cache were not written there for the other model.
            self._tokens[request.row, known : known + count] = request.tokens[known : known + count]
            self._note(request, known + count)
        # Rows of one token come first.
        order = sorted(range(len(work)), key=lambda i: work[i][2] != 1 or not work[i][3])
        told: list[int | None] = [None] * len(work)
        tokens = iter(self._run([work[i] for i in order]) if work else [])
        for i in order:
            if work[i][3]:
                told[i] = next(tokens)
        return told

    def _known(self, request: Request) -> int:
        """Never all: the last is read for what comes next."""
        return min(self._records.known(request), len(request.tokens) - 1)

    def _note(self, request: Request, known: int) -> None:
        self._records.note(request, known)

    def _run(self, work: list[tuple[int, int, int, int]]) -> list[int]:
        """Compute tokens of rows, and sample behind those that say so; those that decode come first."""
        self._steps += 1
        rows, starts, counts, samples = (list(column) for column in zip(*work))
        singles = sum(1 for _, _, count, wanted in work if count == 1 and wanted)
        step = Step(self._steps, rows, starts, counts, samples, num_singles=singles)
        tokens = [row[0] for row in self._runner.launch(step).wait().tokens if row]
        if min(tokens, default=0) < 0:
            raise ModelError("the logits of the draft model are not finite")
        return tokens

    def ended(self, request: Request) -> None:
        self._records.ended(request)

    def forget(self, salt: str | None = None) -> None:
        self._records.forget(salt)
