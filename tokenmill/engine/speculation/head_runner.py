"""Runs draft heads on the engine's device, ours and Medusa's, with their matrices stored as suits that device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.model.decoder import Decoder, LayerKV
from tokenmill.model.draft_head import EPS, DraftHead
from tokenmill.model.medusa import MedusaHeads
from tokenmill.ops.types import AttentionBatch, TreeNoise
from tokenmill.quant.forms import parse_form
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.handover import gate_up_for
from tokenmill.quant.schemes.packed import Packed
from tokenmill.quant.schemes.scheme import Linear, QuantScheme
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.settings import Traits

LENGTH = 5


@dataclass(frozen=True)
class Behind:
    """Where chains begin: behind what their rows have cached, which the first step of a chain may attend to."""

    positions: torch.Tensor  # [n]: where the tokens stand that come next
    batch: AttentionBatch  # one query each, over the keys before that


def single_queries(
    state: DeviceState,
    rows: torch.Tensor,  # [n] int32
    context: torch.Tensor,  # [n] int32
    q_start: torch.Tensor,  # [n + 1] int32: 0, 1, 2, ...
    host: tuple[list[int], list[int]] | None = None,  # the same rows and contexts; None: a recording serves any
) -> AttentionBatch:
    n = len(rows)
    host_rows, host_context = host or ([0] * n, [state.max_len] * n)
    return AttentionBatch(
        rows=rows,
        q_start=q_start,
        context=context,
        block_tables=state.block_tables,
        num_singles=n,
        max_query=1,
        max_context=max(host_context),
        host_rows=host_rows,
        host_counts=[1] * n,
        host_context=host_context,
    )


class DraftingHead(ABC):
    """Drafts token after token from a hidden state; tokens are picked as the target's own are."""

    shape: list[list[int]]  # of the matrices: equal for heads that launch the same kernels
    length = LENGTH  # tokens that are drafted at most
    attends = False  # to what its target has cached
    branches = False  # a step depends on its state and token alone: several tokens may continue one state

    def __init__(self, decoder: Decoder, sampler: Sampler, ids: torch.Tensor) -> None:  # [draft vocabulary]
        self._decoder, self._sampler = decoder, sampler
        self.ids = ids.to(decoder.weights.device).long()
        # Of the target's tokens, where they are
        self.places = torch.zeros(decoder.spec.vocab_size, dtype=torch.int64, device=self.ids.device)
        self.places[self.ids] = torch.arange(len(self.ids), device=self.ids.device)

    @abstractmethod
    def enter(self, hidden: torch.Tensor) -> torch.Tensor: ...  # [n, hidden] -> [n, state]

    @abstractmethod
    def step(
        self,
        state: torch.Tensor,  # [n, state]
        ids: torch.Tensor,  # [n]: the tokens that come next
        behind: Behind | None = None,  # in the first step of a chain, for heads that attend
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # the states behind them, and logits [n, draft vocabulary]

    def pick(self, logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor, depth: int) -> torch.Tensor:
        """The likeliest tokens [n], which are also written to the rows' drafts [table rows, drafted]."""
        fused = self._decoder.ops.chosen.get("head_pick")
        if fused is not None:
            picked: torch.Tensor = fused.fn(logits, self.ids, rows, drafts, depth)
            return picked
        tokens = self.ids[logits.argmax(-1)]
        drafts[rows, depth] = tokens
        return tokens

    def choose(
        self,
        logits: torch.Tensor,  # [n, draft vocabulary]
        best: torch.Tensor | None,  # [n]: where they are largest, if that is known
        rows: torch.Tensor,  # [n]
        positions: torch.Tensor,  # [n]: where the tokens will stand
        traits: Traits,
    ) -> torch.Tensor:  # [n]: tokens of the target
        """With the noise that the target will be sampled with at that position: what both find likely is the same."""
        if not traits.warm:
            return self.ids[logits.argmax(-1) if best is None else best]
        whole = logits.new_full((len(rows), self._decoder.spec.vocab_size), -torch.inf)
        whole[:, self.ids] = logits
        sampled = self._sampler.sample(whole, rows, positions, Traits(True, traits.filtered, False, None))
        return sampled.tokens.clamp_min(0)  # of logits that are no numbers any token will do

    def branch(
        self,
        logits: torch.Tensor,  # [n * parents, draft vocabulary]
        states: torch.Tensor,  # [n * parents, state]
        scores: torch.Tensor | None,  # [n * parents]
        rows: torch.Tensor,  # [n]
        state: DeviceState,
        depth: int,
        noise: TreeNoise | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The nodes of the next depth of the rows' trees: their tokens, their parents' states, and their scores."""
        grow = self._decoder.ops.grow_tree
        return grow(logits, self.ids, states, scores, state.trees, state.drafts, rows, depth, noise)

    def noise(self, rows: torch.Tensor, positions: torch.Tensor, traits: Traits) -> TreeNoise | None:
        """positions [n]: of the rows' newest tokens."""
        return TreeNoise(*self._sampler.noise(rows), positions) if traits.warm else None

    def _linear(self, weight: torch.Tensor, native: bool, bias: torch.Tensor | None = None) -> Linear:
        """native: packed for the native CPU library."""
        dtype, device = self._decoder.weights.dtype, self._decoder.weights.device
        scheme: QuantScheme = Packed(parse_form("int4")) if native else Dense()
        rows, columns = weight.shape
        storage = scheme.allocate(rows, columns, dtype, device)
        scheme.write(storage, 0, weight.to(device, dtype))
        return Linear(scheme, storage, None if bias is None else bias.to(device, dtype))


class HeadRunner(DraftingHead):
    """Drafts one token after the other, each from the state that the ones before it left."""

    branches = True

    def __init__(
        self, head: DraftHead, decoder: Decoder, sampler: Sampler, native: bool, kv: list[LayerKV] | None = None
    ) -> None:
        """native: matrices are packed for the native CPU library; kv: what the target caches, for heads that attend."""
        super().__init__(decoder, sampler, head.ids)
        weights = decoder.weights

        def linear(weight: torch.Tensor) -> Linear:
            return self._linear(weight, native)

        def norm(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(weights.device, weights.dtype)

        self._enter_norm, self._mix_norm = norm(head.enter_norm), norm(head.mix_norm)
        self._norm2, self._out_norm = norm(head.norm2), norm(head.out_norm)
        self._enter, self._head = linear(head.enter_weight), linear(head.head_weight)
        self._gate_up, self._down = linear(head.gate_up_weight), linear(head.down_weight)
        self._gate_up2, self._down2 = linear(head.gate_up2_weight), linear(head.down2_weight)
        self.shape = [list(one.shape) for one in (head.gate_up_weight, head.gate_up2_weight, head.head_weight)]
        if head.kv_layer is not None:
            assert head.attention_norm is not None and head.q_weight is not None and head.o_weight is not None
            assert kv is not None
            self.attends, self._layer, self._kv = True, head.kv_layer, kv[head.kv_layer]
            self._attention_norm = norm(head.attention_norm)
            self._q, self._o = linear(head.q_weight), linear(head.o_weight)
            self.shape.append(list(head.q_weight.shape))

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n, state]
        return self._enter(self._decoder.ops.rms_norm(hidden, self._enter_norm, EPS))

    def step(
        self, state: torch.Tensor, ids: torch.Tensor, behind: Behind | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fused, embed = self._decoder.ops.chosen.get("head_input"), self._decoder.plain_embedding
        if fused is not None and embed is not None:
            return self._after(fused.fn(state, ids, embed, self._mix_norm, EPS), state, behind)
        embedding, _ = self._decoder.embed(ids).take()
        return self.mix(torch.cat([state, embedding], dim=-1), state, behind)

    def mix(self, both: torch.Tensor, state: torch.Tensor, behind: Behind | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`step` from [n, state + hidden]: the state, which may be overwritten, and the embedding behind it."""
        return self._after(self._decoder.ops.rms_norm(both, self._mix_norm, EPS), state, behind)

    def _after(
        self, mixed: torch.Tensor, state: torch.Tensor, behind: Behind | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ops = self._decoder.ops
        update = self._down(gate_up_for(self._down, ops, self._gate_up, mixed, "silu"))
        if behind is not None:
            mixed, state = ops.add_rms_norm(update, state, self._attention_norm, EPS)
            update = self._o(self._attended(self._q(mixed), behind))
        mixed, state = ops.add_rms_norm(update, state, self._norm2, EPS)
        update = self._down2(gate_up_for(self._down2, ops, self._gate_up2, mixed, "silu"))
        mixed, state = ops.add_rms_norm(update, state, self._out_norm, EPS)
        return state, self._head(mixed)

    def _attended(self, q: torch.Tensor, behind: Behind) -> torch.Tensor:  # [n, heads * dim] -> [n, heads * dim]
        decoder = self._decoder
        q = q.view(-1, decoder.spec.heads, decoder.spec.head_dim)
        decoder.ops.rope(q, decoder.rope_tables[self._layer], behind.positions)
        return decoder.attend(self._layer, q, self._kv, behind.batch).flatten(1)


class MedusaRunner(DraftingHead):
    """Every token from the same hidden state, each by a head of its own."""

    branches = True

    def __init__(self, heads: MedusaHeads, decoder: Decoder, sampler: Sampler, native: bool) -> None:
        super().__init__(decoder, sampler, torch.arange(decoder.spec.vocab_size))
        self.length = len(heads.heads)
        self._blocks = [[self._linear(weight, False, bias) for weight, bias in blocks] for blocks in heads.blocks]
        self._heads = [self._linear(weight, native) for weight in heads.heads]
        self.shape = [[len(blocks)] for blocks in heads.blocks]
        self._depth = 0

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        self._depth = 0
        return hidden

    def step(
        self, state: torch.Tensor, ids: torch.Tensor, behind: Behind | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = state
        for block in self._blocks[self._depth]:
            mixed = mixed + torch.nn.functional.silu(block(mixed))
        logits = self._heads[self._depth](mixed)
        self._depth += 1
        return state, logits
