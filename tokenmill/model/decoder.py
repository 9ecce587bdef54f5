"""The one decoder: runs the tokens of a step through every layer of any architecture that a DecoderSpec describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from tokenmill.model.expert_exchange import ExpertExchange
from tokenmill.model.experts import ExpertLimits, ExpertLoad, LocalExperts, within_capacity
from tokenmill.model.layers import (
    AttentionWeights,
    LatentAttentionWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
    WeightStore,
    layer_kind,
    linears,
    with_adapters,
)
from tokenmill.model.moe import experts_of
from tokenmill.model.rope import rope_table
from tokenmill.model.spec import DecoderSpec, MLASpec
from tokenmill.ops.invariant import slices_of
from tokenmill.ops.kv_forms import KVScales
from tokenmill.ops.registry import Ops
from tokenmill.ops.types import AttentionBatch, Mask, Rows
from tokenmill.parallel.communicator import Communicator
from tokenmill.quant.schemes.adapters import LowRankUpdates, RowContext
from tokenmill.quant.schemes.experts import Experts, experts_of_floats, moe_each
from tokenmill.quant.schemes.handover import add_norm_for, gate_up_for
from tokenmill.quant.schemes.scheme import Linear

Watch = Callable[[int, torch.Tensor], None]  # sees each layer's result, [tokens, hidden]
Attend = Callable[[int, torch.Tensor], torch.Tensor]  # a layer's queries [tokens, heads, dim] -> what its heads found


@dataclass
class LayerKV:
    """The paged cache of one layer: floats, or codes with scales. With MLA, v is the view k[..., rope_dim:]."""

    k: torch.Tensor  # [blocks, block_size, kv_heads, k_dim]
    v: torch.Tensor  # [blocks, block_size, kv_heads, v_dim]
    scales: KVScales | None = None


@dataclass(frozen=True)
class Features:
    """What some layers start from, side by side: an EAGLE head drafts from it."""

    layers: tuple[int, ...]
    states: torch.Tensor  # [tokens, layers * hidden]

    def of(self, index: int) -> torch.Tensor:  # [tokens, hidden]
        return self.states.view(len(self.states), len(self.layers), -1)[:, self.layers.index(index)]

    def keep(self, index: int, residual: torch.Tensor) -> None:  # [tokens, hidden]
        if index in self.layers:
            self.of(index).copy_(residual)


@dataclass
class TokenBatch:
    """The tokens of one step, rows one after the other."""

    ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]: where each token's key and value go; negative: nowhere
    attention: AttentionBatch
    attend: Attend | None = None  # stands in for `Decoder.attend`: for whoever records what lies between two of them
    context: RowContext | None = None  # what tokens ask of linear layers, each for itself; None: nothing
    features: Features | None = None  # filled where somebody asks for them
    enters: torch.Tensor | None = None  # [tokens, hidden]: what an earlier stage made of them; None: their ids do


class Hidden:
    """What goes from layer to layer: the residual, and what the last block computed, not yet added to it."""

    def __init__(self, residual: torch.Tensor, update: torch.Tensor | None = None) -> None:  # [tokens, hidden] each
        self._tensors: tuple[torch.Tensor, torch.Tensor | None] | None = (residual, update)

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both, once: whoever computes with them decides how long they live."""
        taken, self._tensors = self._tensors, None
        assert taken is not None
        return taken


class Attended:
    """A layer between its two halves: what its heads found, and the residual."""

    def __init__(
        self,
        index: int,
        layer: LayerWeights,
        mixed: torch.Tensor,
        residual: torch.Tensor,
        context: RowContext | None = None,
    ) -> None:
        self.index, self.layer, self.context = index, layer, context
        self._tensors = [mixed, residual]  # [tokens, heads, v_dim], [tokens, hidden]

    def pick(self, wanted: torch.Tensor) -> None:  # [n]
        """Go on with these tokens only."""
        self._tensors[:] = [one[wanted] for one in self._tensors]
        self.context = None if self.context is None else self.context.pick(wanted)

    def take(self) -> list[torch.Tensor]:
        """Both, once, as of `Hidden`."""
        taken, self._tensors = self._tensors, []
        return taken


class Decoder:
    """Computes hidden states and logits. Holds only weights and constants, so passes do not affect each other."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightStore,
        ops: Ops,
        max_len: int | None = None,
        ranks: Communicator | None = None,
        expert_ranks: Communicator | None = None,
    ) -> None:
        """max_len bounds the positions that will be asked for (default: all that the model knows). ranks: those that
        have the other parts of its layers, where the spec is that of a part; each calls this one's methods alike.
        expert_ranks: those that have other experts, and other tokens; None: other experts are on `ranks`.
        """
        self.spec = spec
        self.ranks = ranks
        self.weights = weights
        self.ops = ops
        self.adapters: Mapping[str, LowRankUpdates] = {}  # by canonical name of the linear layer
        length = max_len or spec.max_positions
        tables = {rope: rope_table(rope, length, weights.device) for rope in set(spec.ropes)}
        self.rope_tables = [tables[rope] for rope in spec.ropes]  # one per layer, shared where equal
        self._masks = [Mask(window=window, softcap=spec.attn_softcap) for window in spec.windows]
        self.order: Sequence[int] = range(spec.num_layers)  # the layers that a pass runs: see `one_of_each_kind`
        self.expert_limits = ExpertLimits()
        self.expert_load: ExpertLoad | None = None  # counted where somebody asks for it: `count_experts`
        has_experts = spec.part is not None and spec.part.experts is not None
        self._experts: LocalExperts | ExpertExchange | None = None
        if has_experts:
            self._experts = (
                LocalExperts(spec, weights.device)
                if expert_ranks is None
                else ExpertExchange(spec, expert_ranks, weights.device)
            )
        self._moe = ops.moe
        if spec.moe is not None and ops.chosen["moe"].sliced:  # batch-invariant
            slices = slices_of(spec.moe.intermediate, 1 if spec.part is None else spec.part.ranks)
            self._moe = partial(ops.moe, slices=slices)
        # Checkpoints were trained with the scale rounded to the embedding's dtype.
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=weights.dtype).item()

    def forward(
        self,
        tokens: TokenBatch,
        kv: list[LayerKV],
        watch: Watch | None = None,
        wanted: torch.Tensor | None = None,  # [n]: tokens whose hidden states are read; None: all
    ) -> torch.Tensor:  # [tokens, hidden] or [n, hidden], normed
        """Of tokens that nobody reads, the last layer computes keys and values only."""
        return self.end(self.begin(tokens, kv, watch), watch, wanted)

    def begin(self, tokens: TokenBatch, kv: list[LayerKV], watch: Watch | None = None) -> Attended:
        """Up to the last layer's attention."""
        *before, last = self.order
        return self.attention_of(last, self.layers(before, self.enter(tokens), tokens, kv, watch), tokens, kv)

    def end(
        self,
        attended: Attended,  # emptied, so that no caller keeps its tensors alive
        watch: Watch | None = None,
        wanted: torch.Tensor | None = None,  # [m]: which of its tokens; None: all
    ) -> torch.Tensor:  # [tokens, hidden] or [m, hidden], normed
        """What follows `begin`, for all of its tokens or for some."""
        if wanted is not None:
            attended.pick(wanted)
            if not wanted.numel():  # kernels have nothing to launch for no rows
                self.assist([attended.index])
                return attended.take()[1]
        return self.norm(self.mlp_of(attended, watch))

    def enter(self, tokens: TokenBatch) -> Hidden:
        """What the first layer here starts from."""
        if tokens.enters is None:
            return self.embed(tokens.ids)
        return Hidden(self.ops.scaled(tokens.enters, 1.0))  # a copy: layers write on their residual

    def assist(self, indices: Iterable[int]) -> None:
        """Without a token of its own: what other ranks have for the experts that are here."""
        if not isinstance(self._experts, ExpertExchange):
            return
        for index in indices:
            mlp, moe = self.weights.layer(index).mlp, self.spec.moe
            if isinstance(mlp, MoEWeights) and moe is not None:
                compute, gate_up, down = self._expert_product(mlp)
                none, share = mlp.router.new_empty(0, self.spec.hidden), mlp.router.new_empty(0, moe.top_k)
                none = none.to(self.weights.dtype)
                self._experts.compute(compute, none, share, share.long(), gate_up, down, self.spec.activation)

    def leave(self, tokens: TokenBatch, kv: list[LayerKV]) -> torch.Tensor:  # [tokens, hidden]
        """All layers of a stage, for the next one to go on with."""
        residual, update = self.layers(self.order, self.enter(tokens), tokens, kv).take()
        return residual if update is None else self.ops.add(residual, update)

    def layers(
        self,
        indices: Iterable[int],  # in their order: a rank or an offloading store runs a range of them
        hidden: Hidden,
        tokens: TokenBatch,
        kv: list[LayerKV],
        watch: Watch | None = None,
    ) -> Hidden:
        for index in indices:
            hidden = self.mlp_of(self.attention_of(index, hidden, tokens, kv), watch)
        return hidden

    def attention_of(self, index: int, hidden: Hidden, tokens: TokenBatch, kv: list[LayerKV]) -> Attended:
        """The first half of a layer, whose weights are asked for here."""
        whole = self.weights.layer(index)
        layer = self._for_rows(index, whole, tokens.context)
        residual, update = hidden.take()
        x, residual = self._add_norm(update, residual, layer.before_attention, layer.attention.qkv)
        del update
        mixed = self._mix(index, x, layer.attention, tokens, kv[index])
        if tokens.features is not None:  # (not before: the projection may have added up the residual)
            tokens.features.keep(index, residual)
        return Attended(index, whole, mixed, residual, tokens.context)

    def features(self, layers: tuple[int, ...], tokens: int) -> Features:
        """Room for what these layers start from."""
        width, weights = len(layers) * self.spec.hidden, self.weights
        return Features(layers, torch.empty(tokens, width, dtype=weights.dtype, device=weights.device))

    def attention_on(
        self, index: int, x: torch.Tensor, residual: torch.Tensor, tokens: TokenBatch, kv: list[LayerKV]
    ) -> Attended:
        """The same of an input that somebody else has made."""
        layer = self.weights.layer(index)
        return Attended(index, layer, self._mix(index, x, layer.attention, tokens, kv[index]), residual)

    def mlp_of(self, attended: Attended, watch: Watch | None = None) -> Hidden:
        """The second half."""
        layer = self._for_rows(attended.index, attended.layer, attended.context)
        mixed, residual = attended.take()
        update = self._join(mixed, layer)
        del mixed
        x, residual = self._add_norm(update, residual, layer.before_mlp, _only_reader(layer.mlp))
        update = self._norm(self._sum(self._mlp(attended.index, x, layer.mlp)), layer.after_mlp)
        if watch is not None:
            watch(attended.index, residual + update)
        return Hidden(residual, update)

    def _for_rows(self, index: int, layer: LayerWeights, context: RowContext | None) -> LayerWeights:
        if context is None or not self.adapters:
            return layer
        return with_adapters(layer, f"layers.{index}.", self.adapters, context)

    def norm(self, hidden: Hidden) -> torch.Tensor:  # [tokens, hidden]
        """What the head reads."""
        residual, update = hidden.take()
        return _as_tensor(self._add_norm(update, residual, self.weights.final_norm, None)[0])

    @cached_property
    def kinds(self) -> dict[object, int]:
        """What layers there are, by what they are made of and how they look at others; the first of each kind."""
        found: dict[object, int] = {}
        for index in range(self.spec.num_layers):
            kind = layer_kind(self.weights.peek(index)), self._masks[index], self.rope_tables[index].dtype
            found.setdefault(kind, index)
        return found

    @property
    def recordable(self) -> bool:
        """Whether all that steps launch can be recorded."""
        if self.ranks is not None and not self.ranks.recordable:
            return False  # the host exchanges what is between ranks
        multiply = (one.matmul(self.weights.dtype) for one in linears(self.weights, self.spec.num_layers))
        if not self.ops.capture_safe(with_moe=False) or not all(one.recordable for one in multiply):
            return False
        counted = self._experts is not None or self.expert_load is not None
        if self.weights.device.type == "cpu" and counted:
            return False  # torch does that
        mixtures = (self.weights.peek(index).mlp for index in range(self.spec.num_layers))
        ops = {self._expert_op(one) for one in mixtures if isinstance(one, MoEWeights)}
        return all(op in self.ops.chosen and self.ops.chosen[op].capture_safe for op in ops)

    @contextmanager
    def one_of_each_kind(self) -> Iterator[None]:
        """Inside, a pass runs one layer of each kind and the last one: every op that there is, in little time."""
        whole, self.order = self.order, sorted({*self.kinds.values(), self.spec.num_layers - 1})
        try:
            yield
        finally:
            self.order = whole

    def attend(
        self,
        index: int,  # of the layer
        q: torch.Tensor,  # [tokens, heads, dim]
        kv: LayerKV,
        batch: AttentionBatch,
    ) -> torch.Tensor:  # [tokens, heads, v_dim]; of latent attention [tokens, heads, kv_rank]
        mask, scale = self._masks[index], self.spec.attn_scale
        return self.ops.attention(q, kv.k, kv.v, batch, mask, scale, scales=kv.scales)

    def count_experts(self) -> ExpertLoad:
        """Count from now on how often each expert is chosen."""
        assert self.spec.moe is not None
        if self.expert_load is None:
            self.expert_load = ExpertLoad(self.spec.num_layers, self.spec.moe.experts, self.weights.device)
        return self.expert_load

    def logits(
        self,
        hidden: torch.Tensor,  # [n, hidden]
        wide: bool = True,  # False: a copy in float32 is not needed, the reader widens what it reads
    ) -> torch.Tensor:  # [n, vocab] float32, or float64; a rank's part of the vocabulary
        logits = self.weights.lm_head(hidden)
        if logits.dtype != torch.float64 and (wide or self.spec.logit_softcap is not None):
            logits = logits.float()
        if self.spec.logit_softcap is not None:
            logits = self.ops.soft_cap(logits, self.spec.logit_softcap)
        return logits

    @property
    def plain_embedding(self) -> torch.Tensor | None:
        """[vocab, hidden], where a token's embedding is its row, as it is."""
        embed, whole = self.weights.embed, self.spec.part is None
        return embed if isinstance(embed, torch.Tensor) and self._embed_scale == 1.0 and whole else None

    def embed(self, ids: torch.Tensor) -> Hidden:
        x = self._sum(self.weights.embedding(ids))
        return Hidden(x if self._embed_scale == 1.0 else self.ops.scaled(x, self._embed_scale))

    def _add_norm(
        self,
        update: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        reader: Linear | None,  # gets the input in the form that it multiplies
    ) -> tuple[Rows, torch.Tensor]:
        """The next block's input, and the residual with the update added."""
        if weight is None:
            residual = residual if update is None else self.ops.add(residual, update)
            return residual, residual
        if update is None:
            return self.ops.rms_norm(residual, weight, self.spec.norm_eps), residual
        return add_norm_for(reader, self.ops, update, residual, weight, self.spec.norm_eps)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self.ops.rms_norm(x, weight, self.spec.norm_eps)

    def _mix(
        self,
        index: int,
        x: Rows,  # [tokens, hidden]
        weights: AttentionWeights | LatentAttentionWeights,
        tokens: TokenBatch,
        kv: LayerKV,
    ) -> torch.Tensor:  # [tokens, heads, v_dim]; of latent attention [tokens, heads, kv_rank]
        """Write the keys and values, and attend."""
        if isinstance(weights, LatentAttentionWeights):
            assert self.spec.mla is not None
            return self._mix_latent(index, x, weights, self.spec.mla, tokens, kv)
        spec = self.spec
        q, k, v = torch.split(weights.qkv(x), [spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
        if spec.qk_norm == "full":
            q, k = self._norm_all_heads(q, weights.q_norm), self._norm_all_heads(k, weights.k_norm)
        q = q.view(-1, spec.heads, spec.head_dim)
        k = k.view(-1, spec.kv_heads, spec.head_dim)
        v = v.view(-1, spec.kv_heads, spec.head_dim)
        head_norms = (weights.q_norm, weights.k_norm) if spec.qk_norm == "head" else (None, None)
        self.ops.rope_kv_write(
            q, k, v, self.rope_tables[index], tokens.positions, kv.k, kv.v, tokens.slots, *head_norms, spec.norm_eps,
            scales=kv.scales,
        )  # fmt: skip
        return self._attend(index, q, tokens, kv)

    def _mix_latent(
        self,
        index: int,
        x: Rows,  # [tokens, hidden]
        weights: LatentAttentionWeights,
        mla: MLASpec,
        tokens: TokenBatch,
        kv: LayerKV,
    ) -> torch.Tensor:  # [tokens, heads, kv_rank]
        """Attention over the latent itself: k_up is applied to the queries, v_up to the result."""
        spec = self.spec
        q, k_rope, latent = torch.split(weights.qkv(x), [spec.q_size, mla.rope_dim, mla.kv_rank], dim=-1)
        if weights.q_up is not None:
            assert weights.q_norm is not None
            q = weights.q_up(self.ops.rms_norm(q, weights.q_norm, mla.norm_eps))
        q = q.view(-1, spec.heads, mla.rope_dim + mla.nope_dim)
        q_rope, q_nope = q[..., : mla.rope_dim], q[..., mla.rope_dim :]
        q = self.ops.per_head(q_nope, weights.k_up, transposed=True, beside=q_rope)  # [tokens, heads, rope + kv_rank]
        k = self.ops.concat(k_rope, self.ops.rms_norm(latent, weights.kv_norm, mla.norm_eps))[:, None]
        self.ops.rope_kv_write(q, k, None, self.rope_tables[index], tokens.positions, kv.k, None, tokens.slots)
        return self._attend(index, q, tokens, kv)

    def _attend(self, index: int, q: torch.Tensor, tokens: TokenBatch, kv: LayerKV) -> torch.Tensor:
        return self.attend(index, q, kv, tokens.attention) if tokens.attend is None else tokens.attend(index, q)

    def _join(
        self,
        mixed: torch.Tensor,  # [n, heads, v_dim or kv_rank]
        layer: LayerWeights,
    ) -> torch.Tensor:  # [n, hidden]
        """What the heads found, as the attention's update."""
        weights = layer.attention
        if isinstance(weights, LatentAttentionWeights):
            mixed = self.ops.per_head(mixed, weights.v_up)
        return self._norm(self._sum(weights.o(mixed.flatten(1))), layer.after_attention)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden]
        """What all ranks have of it."""
        return x if self.ranks is None else self.ranks.all_reduce(x)

    def _norm_all_heads(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:  # [tokens, heads * dim]
        """A norm over the heads of all ranks, of which this one goes on with its own."""
        if self.ranks is None or weight is None or x.shape[1] == len(weight):
            return self._norm(x, weight)
        repeats = self.ranks.size * x.shape[1] // len(weight)  # ranks that have the same heads
        all_heads = self.ranks.all_gather(x.contiguous())[::repeats].transpose(0, 1).flatten(1)
        at = self.ranks.rank // repeats * x.shape[1]
        return self._norm(all_heads, weight)[:, at : at + x.shape[1]]

    def _mlp(self, index: int, x: Rows, weights: MLPWeights | MoEWeights) -> torch.Tensor:
        if isinstance(weights, MLPWeights):
            return weights.down(gate_up_for(weights.down, self.ops, weights.gate_up, x, self.spec.activation))
        x = _as_tensor(x)
        moe = self.spec.moe
        assert moe is not None
        share, experts = experts_of(x, weights.router, moe, self.ops)
        if self.expert_load is not None:
            self.expert_load.add(index, experts)
        if self.expert_limits.capacity is not None:
            most = self.expert_limits.tokens(experts.numel(), moe.experts)
            share, dropped = within_capacity(share, experts, most)
            if self.expert_load is not None:
                self.expert_load.dropped[index] += dropped
        if self.weights.experts is not None:
            experts, weights = self.weights.experts.bring(index, x, experts, weights, self.ops)
        compute, gate_up, down = self._expert_product(weights)
        if self._experts is not None:
            compute = partial(self._experts.compute, compute)
        out = compute(x, share, experts, gate_up, down, self.spec.activation)
        return out if weights.shared is None else self.ops.add(out, self._mlp(index, x, weights.shared))

    def _expert_op(self, weights: MoEWeights) -> str:
        """The op that multiplies them; `moe_each` where there is none for their forms."""
        ops = {one.op if isinstance(one, Experts) else "moe" for one in (weights.gate_up, weights.down)}
        op = ops.pop()
        return op if not ops and op in self.ops.chosen else "moe_each"

    def _expert_product(self, weights: MoEWeights) -> tuple[Callable[..., torch.Tensor], Any, Any]:
        """What multiplies a layer's experts, and what it takes for them."""
        op, both = self._expert_op(weights), (weights.gate_up, weights.down)
        if op == "moe":
            return self._moe, *both
        if op == "moe_each":
            gate_up, down = (one if isinstance(one, Experts) else experts_of_floats(one) for one in both)
            return moe_each, gate_up, down
        gate_up, down = (one.operand for one in both if isinstance(one, Experts))
        return self.ops.chosen[op].fn, gate_up, down


def _only_reader(weights: MLPWeights | MoEWeights) -> Linear | None:
    """The linear layer that alone reads a block's input; a mixture's is read by its router and its experts."""
    return weights.gate_up if isinstance(weights, MLPWeights) else None


def _as_tensor(x: Rows) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)  # no linear layer asked for another form
    return x
