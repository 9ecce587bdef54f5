"""Pruner: chooses which keys and values of old segments survive, and moves them to fewer blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.kv.pruning import Compaction, Pruning
from tokenmill.model.kv_gate import KVGate, features
from tokenmill.ops.kv_forms import dequantize
from tokenmill.ops.reference import rotated

# Layer, position of the first token, keys and values [tokens, kv_heads, dim] -> [tokens, kv_heads], larger stays
Scores = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


class Pruner:
    """Every segment is scored alone and by shapes that never change, from what the cache holds of it: nothing but its
    prefix decides. Keys stay rotated to where their tokens stood; what is quantized is moved as codes.
    """

    def __init__(self, pruning: Pruning, state: DeviceState, scores: Scores) -> None:
        self._pruning, self._state, self._scores = pruning, state, scores

    def compact(self, compactions: Iterable[Compaction]) -> None:
        """In their order: blocks that one of them leaves may be what a later one fills."""
        for one in compactions:
            self._compact(one)

    def _compact(self, one: Compaction) -> None:
        device, kept = self._state.arena.device, self._pruning.kept
        sources, targets = (torch.tensor(blocks, device=device) for blocks in (one.sources, one.targets))
        # [layers, key and value, tokens, kv_heads, width]
        old, scales = (
            None if arena is None else arena[:, :, sources].flatten(2, 3)
            for arena in (self._state.arena, self._state.scales)
        )
        assert old is not None
        wide = torch.promote_types(old.dtype, torch.float32) if scales is None else torch.float32
        floats = old.to(wide) if scales is None else dequantize(old, scales, wide)
        scores = torch.stack([self._scores(at, one.position, k, v) for at, (k, v) in enumerate(floats)])
        # Of equal scores the earlier token's wins, on every device.
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :kept].sort(1).values  # [layers, kept, kv_heads]
        for arena, part in ((self._state.arena, old), (self._state.scales, scales)):
            if arena is not None and part is not None:
                where = best[:, None, :, :, None].expand(-1, part.shape[1], -1, -1, part.shape[-1])
                arena[:, :, targets] = part.gather(2, where).view(*arena[:, :, targets].shape)


def key_norm(layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys that are short get more attention (arXiv 2406.11430)."""
    lengths: torch.Tensor = k.norm(dim=-1)
    return -lengths


def gated(gate: KVGate, rope_tables: list[torch.Tensor]) -> Scores:
    def scores(layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = gate(layer, features(unrotated(k, rope_tables[layer], position), v))
        return found

    return scores


def unrotated(
    k: torch.Tensor,  # [tokens, kv_heads, dim], of consecutive positions
    cos_sin: torch.Tensor,  # [max_positions, rot_dim]
    position: int,  # of the first
) -> torch.Tensor:
    """Keys as they were before they were rotated, up to a factor that the table may hold."""
    cos, sin = cos_sin[position : position + len(k)].chunk(2, dim=1)
    return rotated(k, torch.cat([cos, -sin], dim=1), torch.arange(len(k), device=k.device))
