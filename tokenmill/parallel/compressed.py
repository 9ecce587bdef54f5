"""Sums over ranks that travel in eight bits: a quarter of the bytes, within a stated bound of the exact sum.

Every rank sums one share of the elements and hands the sum to all, both ways as codes with a scale per group of a row.
All ranks get the same bits, and no row depends on another one.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

from tokenmill.parallel.communicator import Communicator
from tokenmill.parallel.sums import sum_by_pairs

GROUP = 128  # elements of a row that share a scale
BOUND = 1 / 126  # of the ranks' largest magnitudes in the group, added up: how far an element may be from the exact sum


class CompressedSums:
    """A communicator whose all_reduce is exact for tensors of few bytes and compressed for larger ones.

    Others of its verbs, and what it counts, are those of the communicator that it is built on: of a compressed sum,
    one all_to_all and one all_gather with the bytes of the codes.
    """

    def __init__(self, exact: Communicator, least_bytes: int) -> None:
        """least_bytes: from which on a sum is compressed; below, it is faster as it is."""
        self.rank, self.size, self.recordable = exact.rank, exact.size, exact.recordable
        self._exact, self._least = exact, least_bytes
        self.all_gather, self.all_to_all, self.barrier = exact.all_gather, exact.all_to_all, exact.barrier
        self.send, self.receive = exact.send, exact.receive
        self.abort, self.close = exact.abort, exact.close

    @property
    def counts(self) -> Counter[str]:
        return self._exact.counts

    @property
    def bytes(self) -> Counter[str]:
        return self._exact.bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or x.nbytes < self._least or not x.is_floating_point():
            return self._exact.all_reduce(x)
        return compressed_all_reduce(self._exact, x)


def compressed_all_reduce(c: Communicator, x: torch.Tensor) -> torch.Tensor:  # [..., dim] -> the same shape and type
    """An element is off by at most BOUND times the sum, over ranks, of the largest magnitude in its group.

    That is for float32; other types add their own rounding of the result. What is not finite makes its group so.
    """
    dim = x.shape[-1]
    groups = F.pad(x.float(), (0, -dim % GROUP)).view(-1, GROUP)
    count = groups.shape[0]
    groups = F.pad(groups, (0, 0, 0, -count % c.size)).view(c.size, -1, GROUP)  # [ranks, share, GROUP]
    share = sum_by_pairs(list(_decoded(c.all_to_all(_encoded(groups)))))
    total = _decoded(c.all_gather(_encoded(share)))
    return total.view(-1, GROUP)[:count].reshape(*x.shape[:-1], -1)[..., :dim].to(x.dtype)


def _encoded(groups: torch.Tensor) -> torch.Tensor:  # [..., GROUP] float32 -> [..., GROUP + 4] int8: codes, then scale
    scales = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups / scales).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def _decoded(encoded: torch.Tensor) -> torch.Tensor:  # [..., GROUP + 4] int8 -> [..., GROUP] float32
    codes, scales = encoded[..., :GROUP], encoded[..., GROUP:].contiguous()
    return codes.float() * scales.view(torch.float32)
