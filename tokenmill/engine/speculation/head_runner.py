"""HeadRunner: runs a draft head on the engine's device, with its matrices stored as suits that device."""

from __future__ import annotations

import torch

from tokenmill.model.decoder import Decoder
from tokenmill.model.draft_head import EPS, DraftHead
from tokenmill.quant.forms import parse_form
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.handover import gate_up_for
from tokenmill.quant.schemes.packed import Packed
from tokenmill.quant.schemes.scheme import Linear, QuantScheme
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.settings import Traits


class HeadRunner:
    """Drafts one token after the other, each from the state that the ones before it left."""

    def __init__(self, head: DraftHead, decoder: Decoder, sampler: Sampler, native: bool) -> None:
        """native: matrices are packed for the native CPU library."""
        self._decoder, self._sampler = decoder, sampler
        weights = decoder.weights
        self._dtype, device = weights.dtype, weights.device
        scheme: QuantScheme = Packed(parse_form("int4")) if native else Dense()

        def linear(weight: torch.Tensor) -> Linear:
            rows, columns = weight.shape
            storage = scheme.allocate(rows, columns, self._dtype, device)
            scheme.write(storage, 0, weight.to(device, self._dtype))
            return Linear(scheme, storage)

        def norm(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(device, self._dtype)

        self._enter_norm, self._mix_norm = norm(head.enter_norm), norm(head.mix_norm)
        self._norm2, self._out_norm = norm(head.norm2), norm(head.out_norm)
        self._enter, self._head = linear(head.enter_weight), linear(head.head_weight)
        self._gate_up, self._down = linear(head.gate_up_weight), linear(head.down_weight)
        self._gate_up2, self._down2 = linear(head.gate_up2_weight), linear(head.down2_weight)
        self.shape = [list(one.shape) for one in (head.gate_up_weight, head.gate_up2_weight, head.head_weight)]
        self.ids = head.ids.to(device).long()
        self.places = torch.zeros(decoder.spec.vocab_size, dtype=torch.int64, device=device)  # of the target's tokens
        self.places[self.ids] = torch.arange(len(self.ids), device=device)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n, state]
        return self._enter(self._decoder.ops.rms_norm(hidden, self._enter_norm, EPS))

    def step(self, state: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, state] and the token that comes next [n] -> the state behind it, and logits [n, draft vocabulary]."""
        fused, embed = self._decoder.ops.chosen.get("head_input"), self._decoder.plain_embedding
        if fused is not None and embed is not None:
            return self._after(fused.fn(state, ids, embed, self._mix_norm, EPS), state)
        embedding, _ = self._decoder.embed(ids).take()
        return self.mix(torch.cat([state, embedding], dim=-1), state)

    def mix(self, both: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`step` from [n, state + hidden]: the state, which may be overwritten, and the embedding behind it."""
        return self._after(self._decoder.ops.rms_norm(both, self._mix_norm, EPS), state)

    def _after(self, mixed: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops = self._decoder.ops
        update = self._down(gate_up_for(self._down, ops, self._gate_up, mixed, "silu"))
        mixed, state = ops.add_rms_norm(update, state, self._norm2, EPS)
        update = self._down2(gate_up_for(self._down2, ops, self._gate_up2, mixed, "silu"))
        mixed, state = ops.add_rms_norm(update, state, self._out_norm, EPS)
        return state, self._head(mixed)

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
        return self._sampler.sample(whole, rows, positions, Traits(True, traits.filtered, False, None)).tokens
