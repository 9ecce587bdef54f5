"""Keys and values of all ranks in memory that they share, so that blocks travel in one form however heads are divided.

A block's bytes are those of one rank: all heads, in the model's order. Rank 0, which has the transports, gathers them
from where each rank keeps its heads. The memory outlives a generation: blocks that are on their way when a rank is lost
are held by their transfers, so nobody writes on them meanwhile.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.rank_model import Prepared, RankModel, RankRunner
from tokenmill.engine.ranks.shared_words import SharedMemory
from tokenmill.engine.runner.arenas import arena_bytes, arenas
from tokenmill.engine.runner.block_memory import ArenaMemory, EngineMemory
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.tiers import wants_tiers
from tokenmill.model.spec import DecoderSpec
from tokenmill.parallel.layout import parse_layout
from tokenmill.plan.solve.settings import SolvedSettings

_PAGE = 4096


class SharedKV:
    """As much for each rank."""

    def __init__(self, ranks: int, size: int) -> None:
        self.ranks = ranks
        self.memory = SharedMemory.of_size(ranks * -(-size // _PAGE) * _PAGE)

    def part(self, rank: int) -> torch.Tensor:  # [bytes]
        return _part(self.memory, rank, self.ranks)


def part_of(file: int, rank: int, ranks: int) -> torch.Tensor:
    """For another rank, which takes the open file over."""
    memory = SharedMemory(file)
    found = _part(memory, rank, ranks)
    memory.close()  # the file; what is mapped stays as long as the tensor
    return found


def _part(memory: SharedMemory, rank: int, ranks: int) -> torch.Tensor:
    size = len(memory.bytes) // ranks
    return torch.frombuffer(memory.bytes, dtype=torch.uint8, offset=rank * size, count=size)


def shared_kv_for(config: EngineConfig, made: Prepared, settings: SolvedSettings) -> SharedKV | None:
    """None: there is one rank, or ranks have other layers or requests, or nobody asks for anybody's blocks."""
    layout = parse_layout(config.parallel)
    if not wants_tiers(config) or layout.ranks == 1 or layout.ranks != layout.tp:
        return None
    return SharedKV(layout.tp, arena_bytes(made.part, settings.num_blocks, settings.block_size, made.kv_dtype))


def block_memory(model: RankModel, runner: RankRunner, shared: SharedKV | None) -> EngineMemory | None:
    """The blocks of the whole model, where this process reaches them."""
    if shared is not None:
        return GroupMemory(model, shared)
    part = model.prepared.part.part
    return ArenaMemory(runner.state) if isinstance(runner, TorchRunner) and part is None else None


Bytes = npt.NDArray[np.uint8]


class GroupMemory:
    """What `ArenaMemory` is of one rank. A rank has the heads from `first` on; several may have the same ones."""

    def __init__(self, model: RankModel, shared: SharedKV) -> None:
        made, settings = model.prepared, model.settings
        spec, whole = made.part, _whole(made.part)
        ranks = [
            arenas(spec, settings.num_blocks, settings.block_size, made.kv_dtype, made.device, model.native_kv, memory)
            for memory in map(shared.part, range(shared.ranks))
        ]
        mine, heads = spec.kv_shapes[0].kv_heads, whole.kv_shapes[0].kv_heads
        firsts = [rank * heads // shared.ranks for rank in range(shared.ranks)]
        self._places = [slice(first, first + mine) for first in firsts]
        kinds = [[tensor for tensor in one if tensor is not None] for one in zip(*ranks, strict=True)]
        self._kinds: list[tuple[tuple[int, ...], list[Bytes]]] = []  # shape of a whole block, and each rank's blocks
        forms, self.block_bytes = [], 0
        for tensors in filter(None, kinds):
            layers, parts, _, size, _, width = tensors[0].shape
            forms.append(f"{tensors[0].dtype}:{[layers, parts, size, heads, width]}")
            views = [one.view(torch.uint8).movedim(2, 0).numpy() for one in tensors]
            shape = (layers, parts, size, heads, views[0].shape[-1])
            self._kinds.append((shape, views))
            self.block_bytes += int(np.prod(shape))
        self.form = ";".join(forms)

    def allocate(self, size: int) -> memoryview:
        return memoryview(mmap.mmap(-1, max(size, 1)))[:size]

    def gather(self, blocks: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block, target in zip(blocks, targets, strict=True):
            for whole, views in self._parts(target):
                for place, view in zip(self._places, views, strict=True):
                    np.copyto(whole[..., place, :], view[block])

    def scatter(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        for block, source in zip(blocks, sources, strict=True):
            for whole, views in self._parts(source):
                for place, view in zip(self._places, views, strict=True):
                    np.copyto(view[block], whole[..., place, :])

    def _parts(self, payload: memoryview) -> Iterator[tuple[Bytes, list[Bytes]]]:
        flat, at = np.frombuffer(payload, dtype=np.uint8), 0
        for shape, views in self._kinds:
            size = int(np.prod(shape))
            yield flat[at : at + size].reshape(shape), views
            at += size


def _whole(spec: DecoderSpec) -> DecoderSpec:
    return spec if spec.part is None else spec.part.whole
