"""Copies modules into rows: slots and turns of a step's placements, then every layer's keys and values."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.step import Step
from tokenmill.model.decoder import Decoder
from tokenmill.model.spec import RopeSpec


def place_modules(step: Step, decoder: Decoder, state: DeviceState) -> None:
    """After the step's blocks are in the tables, and before anything is computed. What models beside this one keep of
    the same tokens is not copied: theirs are drafts, which are verified."""
    size, device = state.block_size, state.tokens.device
    columns: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]] = []
    for number, one in enumerate(step.placements):
        at = np.arange(one.source, one.source + one.count)
        slots = np.array(one.blocks, dtype=np.int64)[at // size] * size + at % size
        positions = np.arange(one.first, one.first + one.count)
        columns.append(np.stack([slots, np.full(one.count, one.row), positions, np.full(one.count, number)]))
    words = torch.from_numpy(np.concatenate(columns, axis=1))
    if device.type == "cuda":
        words = words.pin_memory().to(device, non_blocking=True)
    source, rows, positions_on_device, turn = words
    target = state.slots(rows, positions_on_device)
    ways = torch.tensor([one.first - one.source for one in step.placements])
    turns = {rope: _turns(table, rope.attention_factor, ways) for rope, table in _tables(decoder).items()}
    for layer, kv in enumerate(state.kv):
        decoder.ops.place_kv(kv.k, kv.v, turns[decoder.spec.ropes[layer]], turn, source, target, kv.scales)


def _tables(decoder: Decoder) -> dict[RopeSpec, torch.Tensor]:
    return dict(zip(decoder.spec.ropes, decoder.rope_tables, strict=True))


def _turns(table: torch.Tensor, factor: float, ways: torch.Tensor) -> torch.Tensor:  # [n, rot_dim]
    """Of ways in either direction; whatever the tables' entries are multiplied by, keys have it already."""
    half = table.shape[1] // 2
    found = table[ways.abs().to(table.device)] / factor
    back = (ways < 0).to(table.device)[:, None]
    return torch.cat([found[:, :half], torch.where(back, -found[:, half:], found[:, half:])], dim=1)
