"""The one decoder: runs the tokens of a step through every layer of any architecture that a DecoderSpec describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from tokenmill.model.layers import (
    AttentionWeights,
    LatentAttentionWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
    WeightStore,
    layer_kind,
    with_adapters,
)
from tokenmill.model.moe import experts_of
from tokenmill.model.rope import rope_table
from tokenmill.model.spec import DecoderSpec, MLASpec
from tokenmill.ops.kv_forms import KVScales
from tokenmill.ops.registry import Ops
from tokenmill.ops.types import AttentionBatch, Mask, Rows
from tokenmill.quant.schemes.adapters import LowRankUpdates, RowContext
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


@dataclass
class TokenBatch:
    """The tokens of one step, rows one after the other."""

    ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]: where each token's key and value go; negative: nowhere
    attention: AttentionBatch
    attend: Attend | None = None  # stands in for `Decoder.attend`: for whoever records what lies between two of them
    context: RowContext | None = None  # what tokens ask of linear layers, each for itself; None: nothing


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

    def __init__(self, spec: DecoderSpec, weights: WeightStore, ops: Ops, max_len: int | None = None) -> None:
        """max_len bounds the positions that will be asked for (default: all that the model knows)."""
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self.adapters: Mapping[str, LowRankUpdates] = {}  # by canonical name of the linear layer
        length = max_len or spec.max_positions
        tables = {rope: rope_table(rope, length, weights.device) for rope in set(spec.ropes)}
        self.rope_tables = [tables[rope] for rope in spec.ropes]  # one per layer, shared where equal
        self._masks = [Mask(window=window, softcap=spec.attn_softcap) for window in spec.windows]
        self.order: Sequence[int] = range(spec.num_layers)  # the layers that a pass runs: see `one_of_each_kind`
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
        return self.attention_of(last, self.layers(before, self.embed(tokens.ids), tokens, kv, watch), tokens, kv)

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
                return attended.take()[1]
        return self.norm(self.mlp_of(attended, watch))

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
        return Attended(index, whole, mixed, residual, tokens.context)

    def mlp_of(self, attended: Attended, watch: Watch | None = None) -> Hidden:
        """The second half."""
        layer = self._for_rows(attended.index, attended.layer, attended.context)
        mixed, residual = attended.take()
        update = self._join(mixed, layer)
        del mixed
        x, residual = self._add_norm(update, residual, layer.before_mlp, _only_reader(layer.mlp))
        update = self._norm(self._mlp(x, layer.mlp), layer.after_mlp)
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
            kind = layer_kind(self.weights.layer(index)), self._masks[index], self.rope_tables[index].dtype
            found.setdefault(kind, index)
        return found

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

    def logits(
        self,
        hidden: torch.Tensor,  # [n, hidden]
        wide: bool = True,  # False: a copy in float32 is not needed, the reader widens what it reads
    ) -> torch.Tensor:  # [n, vocab] float32, or float64
        logits = self.weights.lm_head(hidden)
        if logits.dtype != torch.float64 and (wide or self.spec.logit_softcap is not None):
            logits = logits.float()
        if self.spec.logit_softcap is not None:
            logits = self.ops.soft_cap(logits, self.spec.logit_softcap)
        return logits

    @property
    def plain_embedding(self) -> torch.Tensor | None:
        """[vocab, hidden], where a token's embedding is its row, as it is."""
        embed = self.weights.embed
        return embed if isinstance(embed, torch.Tensor) and self._embed_scale == 1.0 else None

    def embed(self, ids: torch.Tensor) -> Hidden:
        x = self.weights.embedding(ids)
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
            q, k = self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)
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
        q_latent = torch.bmm(q_nope.transpose(0, 1), weights.k_up).transpose(0, 1)  # [tokens, heads, kv_rank]
        q = torch.cat([q_rope, q_latent], dim=-1)
        k = torch.cat([k_rope, self.ops.rms_norm(latent, weights.kv_norm, mla.norm_eps)], dim=-1)[:, None]
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
            mixed = torch.bmm(mixed.transpose(0, 1), weights.v_up.transpose(1, 2)).transpose(0, 1)
        return self._norm(weights.o(mixed.flatten(1)), layer.after_attention)

    def _mlp(self, x: Rows, weights: MLPWeights | MoEWeights) -> torch.Tensor:
        if isinstance(weights, MLPWeights):
            return weights.down(gate_up_for(weights.down, self.ops, weights.gate_up, x, self.spec.activation))
        x = _as_tensor(x)
        assert self.spec.moe is not None
        share, experts = experts_of(x, weights.router, self.spec.moe, self.ops)
        out = self.ops.moe(x, share, experts, weights.gate_up, weights.down, self.spec.activation)
        return out if weights.shared is None else out + self._mlp(x, weights.shared)


def _only_reader(weights: MLPWeights | MoEWeights) -> Linear | None:
    """The linear layer that alone reads a block's input; a mixture's is read by its router and its experts."""
    return weights.gate_up if isinstance(weights, MLPWeights) else None


def _as_tensor(x: Rows) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)  # no linear layer asked for another form
    return x
