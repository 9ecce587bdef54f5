"""SymmetricCommunicator: ranks with GPUs exchange tensors through torch's symmetric memory, inside CUDA graphs too.

Every rank has a buffer that the others read over NVLink, or in the same GPU's memory where they share one (under MPS;
without it they take turns of milliseconds). Kernels wait for each other on the device, so no call waits for the host.
A kernel that waits for a rank that is gone does so until its process ends: whoever finds a rank lost ends the others'
processes, and abort only keeps further calls from being launched.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tokenmill.errors import PeerLostError
from tokenmill.parallel.sums import sum_by_pairs

ONE_SHOT_BYTES = 512 << 10  # up to here every rank reads all of everybody's; above, a share, and then the sums
_FULL, _FREE = 1, 2  # channels of signals between two ranks; 0 is that of barriers
_ALIGNED = 16


def start_group(rank: int, size: int, meeting: Path, share_one_gpu: bool) -> Any:
    """Torch's group of all ranks of a machine, who find each other by a file that does not exist yet."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    if share_one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch has no other way to say so
    store = FileStore(str(meeting), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    return dist.group.WORLD


class SymmetricCommunicator:
    """A rank's end of a group of torch.distributed, on the current CUDA device.

    What is captured in a graph is exchanged at each replay, but counted once. Sums of two ranks, and all with
    `by_pairs`, are those of the protocol; others are in the order of ranks, which is as good but other bits.
    """

    recordable = True

    def __init__(self, group: Any, capacity: int = 8 << 20, by_pairs: bool = False, nccl: Any = None) -> None:
        """capacity: bytes of the buffer; nccl: a group of the same ranks, each with a GPU, for larger sums."""
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.size = group.rank(), group.size()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._group, self._by_pairs, self._nccl = group, by_pairs, nccl
        self._capacity = capacity // self.size // _ALIGNED * _ALIGNED * self.size
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffer = symmetric.empty(self._capacity, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._buffer, group)
        self._sends = symmetric.empty(self._capacity, dtype=torch.uint8, device=device)  # a part for every rank
        self._sent = symmetric.rendezvous(self._sends, group)
        self._aborted = False
        for other in range(self.size):
            if other != self.rank:
                self._sent.put_signal(other, _FREE)  # nothing of it waits here
        torch.cuda.synchronize()
        self.barrier()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_reduce", x)
        x = x.contiguous()
        if self.size == 1 or not x.numel():
            return x
        by_pairs = self._by_pairs and self.size > 2
        if self._nccl is not None and x.nbytes > self._capacity and not by_pairs:
            import torch.distributed as dist

            dist.all_reduce(x, group=self._nccl)
            return x
        plain = by_pairs or x.dtype not in (torch.float32, torch.bfloat16)
        out = torch.empty_like(x)
        for part, into in _pieces(x, out, limit=self._capacity):
            if plain or part.nbytes % (_ALIGNED * self.size) or part.data_ptr() % _ALIGNED:
                for parts in self._everybodys(part):
                    into.copy_(sum_by_pairs(parts))
                continue
            buffer = self._buffer[: part.nbytes].view(x.dtype)
            name = self._group.group_name
            if part.nbytes <= ONE_SHOT_BYTES:
                torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, part, "sum", name, into)
            else:
                buffer.copy_(part)
                torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", name)
                into.copy_(buffer)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_gather", x)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        rows = out.view(self.size, -1)
        at = 0
        for (part,) in _pieces(x.contiguous(), limit=self._capacity):
            end = at + part.numel()
            for parts in self._everybodys(part):
                rows[:, at:end] = torch.stack(parts)
            at = end
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_to_all", x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, own = out.view(self.size, -1), x.reshape(self.size, -1)
        step = self._capacity // self.size // x.element_size()
        for at in range(0, own.shape[1], step):
            part, into = own[:, at : at + step].contiguous(), rows[:, at : at + step]
            for parts in self._everybodys(part.view(-1)):
                into.copy_(torch.stack([one.view(part.shape)[self.rank] for one in parts]))
        return out

    def barrier(self) -> None:
        """Of the hosts."""
        import torch.distributed as dist

        self._check()
        self.counts["barrier"] += 1
        dist.barrier(group=self._group)

    def send(self, x: torch.Tensor, to: int) -> None:
        self._count("send", x)
        share = self._capacity // self.size
        for (part,) in _pieces(x.contiguous(), limit=share):
            self._sent.wait_signal(to, _FREE)
            self._sends[to * share : to * share + part.nbytes].view(x.dtype).copy_(part)
            self._sent.put_signal(to, _FULL)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        self._count("receive", like)
        out = torch.empty(like.shape, dtype=like.dtype, device=self._sends.device)
        share = self._capacity // self.size
        for (part,) in _pieces(out, limit=share):
            self._sent.wait_signal(source, _FULL)
            theirs = self._sent.get_buffer(source, (part.nbytes,), torch.uint8, self.rank * share)
            part.copy_(theirs.view(like.dtype))
            self._sent.put_signal(source, _FREE)
        return out

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True

    def _count(self, verb: str, x: torch.Tensor) -> None:
        self._check()
        self.counts[verb] += 1
        self.bytes[verb] += x.nbytes

    def _check(self) -> None:
        if self._aborted:
            raise PeerLostError("a rank of the group is gone")

    def _everybodys(self, part: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yields once, to be read before going on. A graph has the same buffer at every replay, so all wait twice."""
        self._buffer[: part.nbytes].view(part.dtype).copy_(part)
        self._handle.barrier()
        yield [self._handle.get_buffer(rank, part.shape, part.dtype) for rank in range(self.size)]
        self._handle.barrier()


def _pieces(*tensors: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Dense tensors of one shape, flat, in pieces of so many bytes."""
    flat = [x.view(-1) for x in tensors]
    step = limit // flat[0].element_size()
    for at in range(0, len(flat[0]), step):
        yield tuple(x[at : at + step] for x in flat)
