"""EagleProposer: drafts of an EAGLE-3 head, whose layer runs behind every step over the tokens that were computed.

Its keys and values lie in the same numbered blocks as the target's, in an arena of its own, and are written whenever
the target's are: what is found in the prefix cache, forked or computed again is there for both. The entry of a token
needs the token behind it, too, which behind a cached prefix may be another: that costs drafts, and no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from tokenmill.engine.request import Request
from tokenmill.engine.runner.paths import PreparedStep
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.head import CONFIDENCE, LEAST
from tokenmill.engine.speculation.head_runner import Behind, DraftingHead, single_queries
from tokenmill.engine.speculation.proposer import MAX_DRAFTS, Draft
from tokenmill.engine.speculation.recorded_head import chances
from tokenmill.errors import ModelError
from tokenmill.model.decoder import Decoder, TokenBatch
from tokenmill.model.eagle import EagleHead
from tokenmill.model.layers import ResidentWeights, Weight
from tokenmill.ops.registry import Need, select
from tokenmill.ops.types import AttentionBatch
from tokenmill.plan.solve.memory import ModelBytes
from tokenmill.sampling.sampler import Sampler


def with_head(sizes: ModelBytes, head: EagleHead, dtype: torch.dtype) -> ModelBytes:
    """Of the target and its head, for the memory plan."""
    spec, size = head.spec, dtype.itemsize
    own = spec.activation_elements + 3 * spec.hidden
    return replace(
        sizes,
        weights=sizes.weights + size * sum(one.numel() for one in head.tensors.values()),
        kv_per_token=sizes.kv_per_token + spec.kv_bytes_per_token(size),
        activation_per_token=max(sizes.activation_per_token, own * size) + head.tensors["fc"].shape[1] * size,
        rope_per_position=sizes.rope_per_position + 4 * spec.ropes[0].dim,
    )


class EagleRunner(DraftingHead):
    """The layer on the engine's device, with keys and values of its own."""

    def __init__(self, head: EagleHead, runner: TorchRunner, spare_blocks: int = 0) -> None:
        """spare_blocks: behind those that the target has, for drafts that stand where no block is a row's yet."""
        target, tables = runner.decoder, runner.state
        super().__init__(target, runner.sampler, head.ids)
        self.head = head
        dtype, spec = target.weights.dtype, head.spec
        matrices = {name: one for name, one in head.tensors.items() if one.dim() == 2 and name != "embed"}
        others = {name: one.to(runner.device, dtype) for name, one in head.tensors.items() if name not in matrices}
        self._fc = self._linear(matrices.pop("fc"), False)
        self._hidden_norm, self._feature_norm = others.pop("hidden_norm"), others.pop("feature_norm", None)
        self._input_norm = others["layers.0.before_attention"]
        weights: dict[str, Weight] = {"embed": target.weights.embed, **others}
        weights |= {name: self._linear(one, False) for name, one in matrices.items()}
        ops = select(Need(runner.device.type, dtype, spec.attention_head_dim, tables.block_size))
        self._layer = Decoder(spec, ResidentWeights(spec, weights), ops, max_len=tables.max_len)
        self.state = DeviceState(
            spec,
            max_rows=tables.scratch_row,
            max_len=tables.max_len,
            num_blocks=tables.num_blocks + spare_blocks,
            block_size=tables.block_size,
            dtype=dtype,
            device=runner.device,
            native=all(ops.chosen[op].name == "native" for op in ("rope_kv_write", "attention")),
        )
        self.state.tokens, self.state.block_tables = tables.tokens, tables.block_tables
        tables.beside.append(self.state)
        self.shape = [list(one.shape) for one in head.tensors.values()]

    def enter(self, features: torch.Tensor) -> torch.Tensor:  # [n, layers * target's hidden] -> [n, hidden]
        norm, parts = self._feature_norm, self.head.feature_norms
        if norm is not None:
            each = features.view(len(features) * parts, -1)
            each = F.rms_norm(each.float(), each.shape[1:], eps=self.head.spec.norm_eps)
            features = (each.view(features.shape) * norm).to(features.dtype)
        return self._fc(features)

    def run(
        self,
        state: torch.Tensor,  # [n, hidden]: what `enter` gave for tokens, or this for the entry before
        ids: torch.Tensor,  # [n]: the tokens behind them
        positions: torch.Tensor,  # [n]: where the tokens stand, and their keys and values
        slots: torch.Tensor,  # [n]
        attention: AttentionBatch,
    ) -> torch.Tensor:  # [n, hidden]
        layer, eps = self._layer, self.head.spec.norm_eps
        embedding = layer.weights.embedding(ids)
        normed = layer.ops.rms_norm(state, self._hidden_norm, eps)
        x = torch.cat([layer.ops.rms_norm(embedding, self._input_norm, eps), normed], dim=-1)
        batch = TokenBatch(ids, positions, slots, attention)
        residual = normed if self.head.norm_before_residual else state.clone()
        residual, update = layer.mlp_of(layer.attention_on(0, x, residual, batch, self.state.kv)).take()
        assert update is not None
        state = residual + update
        return layer.ops.rms_norm(state, layer.weights.final_norm, eps) if self.head.norm_output else state

    def read(self, prepared: PreparedStep) -> torch.Tensor:  # [tokens, hidden]
        """Write the entries of a step's tokens. Those behind drafts that did not hold are written again before they are
        read: the row computes their positions anew.
        """
        step, tokens, features = prepared.step, prepared.tokens, prepared.features
        assert features is not None
        slots = tokens.slots
        if step.in_float32:  # of these there are no features that could be used
            wide = torch.tensor([index in step.in_float32 for index in range(len(step.rows))])
            each = wide.repeat_interleave(torch.tensor(step.counts))
            slots = slots.masked_fill(each.to(slots.device), -1)
        ids = self.state.tokens[prepared.rows, prepared.positions + 1]
        attention = replace(prepared.attention, cache={})  # of other heads
        return self.run(self.enter(features.states), ids, tokens.positions, slots, attention)

    def logits(self, state: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n, draft vocabulary]
        if not self.head.norm_output:
            state = self._layer.ops.rms_norm(state, self._layer.weights.final_norm, self.head.spec.norm_eps)
        return self._layer.logits(state)

    def step(
        self, state: torch.Tensor, ids: torch.Tensor, behind: Behind | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert behind is not None
        slots = self.state.slots(behind.batch.rows, behind.positions)
        state = self.run(state, ids, behind.positions, slots, behind.batch)
        return state, self.logits(state)


@dataclass
class _Newest:
    """What the layer gave for the newest entries of a row."""

    start: int  # position of the first
    states: torch.Tensor  # [n, hidden]


class EagleProposer:
    """On a device that computes steps while they are launched: a CPU."""

    name = "head"
    kinds = len(CONFIDENCE) + 1
    on_device = 0

    def __init__(self, head: EagleRunner, sampler: Sampler) -> None:
        self._head, self._sampler, self.layers = head, sampler, head.head.layers
        self._newest: dict[int, _Newest] = {}  # by row
        self._failure: Exception | None = None

    def prior(self, kind: int, depth: int) -> float:
        return (0.0, *CONFIDENCE)[kind] * 0.9 + 0.05

    def read(self, prepared: PreparedStep) -> None:
        if self._failure is not None:
            return
        try:
            self._read(prepared)
        except Exception as error:  # the step is as good as without a head, which is switched off when it is asked
            self._failure = error

    def _read(self, prepared: PreparedStep) -> None:
        step, found = prepared.step, self._head.read(prepared)
        end = 0
        for index, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            end += count
            kept = min(count, 1 + MAX_DRAFTS)
            self._newest[row] = _Newest(start + count - kept, found[end - kept : end].clone())
            if index in step.in_float32:
                del self._newest[row]

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        if self._failure is not None:
            raise self._failure
        drafts: list[Draft | None] = [None] * len(requests)
        starts = {i: state for i, one in enumerate(requests) if (state := self._start(one)) is not None}
        if not starts:
            return drafts
        tables, going = self._head.state, list(starts)
        state, ids = torch.stack(list(starts.values())), torch.zeros(len(starts), dtype=torch.int64)
        # The last known token has no place before its step is scheduled, but for the rest of its block.
        rooms = [min(len(one.blocks) * tables.block_size, tables.max_len) - len(one.tokens) + 1 for one in requests]
        logits = self._head.logits(state)
        believed = np.ones(len(going))
        for depth in range(min(self._head.length, length)):
            if depth:
                kept = [n for n, i in enumerate(going) if rooms[i] >= depth and believed[n] >= LEAST]
                if not kept:
                    break
                going, believed = [going[n] for n in kept], believed[kept]
                state, logits = self._head.step(state[kept], ids[kept], self._behind(requests, going, depth))
            rows = [requests[i].row for i in going]
            traits = self._sampler.traits(rows)
            positions = torch.tensor([len(requests[i].tokens) + depth for i in going])
            ids = self._head.choose(logits, None, torch.tensor(rows), positions, traits)
            likely = chances(logits, self._head.places[ids])
            believed = believed * likely
            if not np.isfinite(believed).all():
                self._failure = ModelError("the logits of the EAGLE head are not finite")
                raise self._failure
            kinds = np.searchsorted(CONFIDENCE, likely).tolist()
            for i, token, kind in zip(going, ids.tolist(), kinds, strict=True):
                draft = drafts[i] = drafts[i] or Draft([], [])
                draft.tokens.append(token)
                draft.kinds.append(kind)
        return drafts

    def _start(self, request: Request) -> torch.Tensor | None:  # [hidden]
        """The state of the entry that the newest token belongs to, where a step has left it behind."""
        newest = self._newest.get(request.row)
        if newest is None or request.pending or request.in_float32:
            return None
        place = len(request.tokens) - 2 - newest.start
        return newest.states[place] if 0 <= place < len(newest.states) else None

    def _behind(self, requests: Sequence[Request], going: list[int], depth: int) -> Behind:
        """The entries of the drafts that were made last: one query each, over all before and itself."""
        rows = [requests[i].row for i in going]
        positions = [len(requests[i].tokens) + depth - 2 for i in going]
        context = [one + 1 for one in positions]
        each = torch.arange(len(rows) + 1, dtype=torch.int32)
        on_device = torch.tensor(rows, dtype=torch.int32), torch.tensor(context, dtype=torch.int32)
        batch = single_queries(self._head.state, *on_device, each, (rows, context))
        return Behind(torch.tensor(positions), batch)

    def ended(self, request: Request) -> None:
        pass

    def forget(self, salt: str | None = None) -> None:
        self._newest.clear()
