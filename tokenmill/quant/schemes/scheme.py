"""QuantScheme: who owns the storage of a linear layer's weight, and says what a product needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from tokenmill.ops.matmul import Matmul, MatmulNeed, RunGated, counters_of
from tokenmill.ops.types import Rows, Storage, Unnormed
from tokenmill.quant.groups import Groups

if TYPE_CHECKING:
    from tokenmill.quant.schemes.packed import Blocks


class QuantScheme(Protocol):
    """How a [out, in] matrix is stored, and what multiplies with it.

    A scheme holds no tensors: it allocates a storage, which the linear layer then owns and passes back.
    Rows arrive in any order while loading, each exactly once; `matmul` is asked for only when all have arrived.
    """

    name: str = ""
    floats: bool = False  # the storage's "weight" is the matrix, in floats
    stores_embeddings: bool = False  # it is a TakesRows, so that an embedding may be stored as a linear layer is
    as_in_file: bool = False  # a TakesBlocks: weights stay as the checkpoint has them, which also says what they take
    in_one_part: bool = False  # rows that are written together are stored together: best are all of a matrix
    experts_op: str = "moe_each"  # the op that multiplies experts in this form (quant/schemes/experts.py)
    batch_invariant: bool = False  # a row's products have the same bits in any batch
    kv_dtype: torch.dtype | None = None  # of the KV cache beside rounded weights; None: as the model computes

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage: ...

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Bytes of such a matrix, for the memory plan."""
        ...

    def input_bytes(self, columns: int) -> int:
        """Bytes per token of the copy that a product makes of its input."""
        return 0

    def scratch_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Bytes that a product needs while it runs, whatever the number of tokens."""
        return 0

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        """Store weight [n, in] as rows first_row, ..., converting it to the storage's own form and device."""
        ...

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        """What multiplies inputs of this dtype with what is stored, of the kernels of ops/matmul.py."""
        ...

    def of_head(self) -> QuantScheme:
        """The same for the head, whose products are logits."""
        return self


def counters_beside(need: MatmulNeed) -> Storage:
    """Counters for sums that are computed in parts (split-K), where a kernel does so; all zero between products."""
    count = counters_of(need)
    return {"counters": torch.zeros(count, dtype=torch.int32, device=need.device)} if count else {}


@runtime_checkable
class TakesGroups(Protocol):
    """A scheme that stores what a quantized checkpoint holds without rounding it again."""

    def write_groups(self, storage: Storage, first_row: int, groups: Groups) -> None: ...


@runtime_checkable
class RoundsRows(TakesGroups, Protocol):
    """A scheme that rounds floats to groups, and does so with whole rows where these have one scale each."""

    @property
    def whole_rows(self) -> bool:
        """Scales belong to whole rows: who stores some columns only rounds the whole row first."""
        ...

    def rounded(self, weight: torch.Tensor) -> Groups:  # [n, in]
        ...


@runtime_checkable
class TakesBlocks(Protocol):
    """A scheme that stores the blocks of a GGUF file as they are."""

    def write_blocks(self, storage: Storage, first_row: int, blocks: Blocks) -> None: ...


@runtime_checkable
class StacksExperts(Protocol):
    """A scheme whose storages are more than tensors: it says itself what the op for experts takes."""

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage: ...

    def stack(self, storages: Sequence[Storage]) -> Any: ...


@runtime_checkable
class TakesRows(Protocol):
    """A scheme that can store an embedding, too: its rows come back as floats."""

    def take_rows(self, storage: Storage, ids: torch.Tensor, first: int = 0) -> torch.Tensor:  # [n] -> [n, in]
        """first: the id of the first row; zeros for ids that are not here."""
        ...


@dataclass(frozen=True)
class Linear:
    """A linear layer: a scheme, its storage, and a bias in the model's dtype."""

    scheme: QuantScheme
    storage: Storage
    bias: torch.Tensor | None = None
    _matmuls: dict[torch.dtype, Matmul] = field(default_factory=dict, init=False, repr=False, compare=False)

    def matmul(self, dtype: torch.dtype) -> Matmul:
        """What multiplies inputs of this dtype; chosen once."""
        found = self._matmuls.get(dtype)
        if found is None:
            found = self._matmuls[dtype] = self.scheme.matmul(self.storage, dtype)
        return found

    def __call__(self, x: Rows) -> torch.Tensor:
        if isinstance(x, Unnormed):
            return self.fused(x)
        matmul = self._matmuls.get(x.dtype) or self.matmul(x.dtype)
        return matmul(x, self.storage, self.bias)

    def fuses(self, rows: int, dtype: torch.dtype, gated: bool = False) -> bool:
        """Whether `fused` may be called for so many rows; gated: with an activation."""
        if rows != 1:
            return False
        matmul = self.matmul(dtype)
        return matmul.fused is not None and (matmul.gates or not gated)

    def fused(
        self,
        x: torch.Tensor | Unnormed,  # [1, in]
        act: str = "",  # "silu" or "gelu_tanh": the first half of the result gates the second
    ) -> torch.Tensor:  # [1, out] or [1, out / 2]
        """The product of one row, with the norm before it and the activation behind it."""
        run = self.matmul(x.update.dtype if isinstance(x, Unnormed) else x.dtype).fused
        assert run is not None
        return run(x, self.storage, self.bias, act)

    def gated(self, x: torch.Tensor) -> RunGated | None:  # [rows, in]
        """The product with an activation behind it, as run(x, storage, act), where a kernel for many rows has both."""
        fits = self.bias is None and x.is_contiguous() and x.data_ptr() % 16 == 0  # as the copy engine needs them
        return self.matmul(x.dtype).gated(x.shape[0]) if fits else None

    def inputs(self, rows: int, dtype: torch.dtype) -> torch.dtype | None:
        """The codes that so many rows are rounded to, so that they may be handed over like that; None: none."""
        return self.matmul(dtype).inputs(rows)


@dataclass(frozen=True)
class Schemes:
    """The scheme of every linear layer, by canonical name: `layers.3.gate_up`, `lm_head`; and of the embedding."""

    default: QuantScheme
    named: Mapping[str, QuantScheme] = field(default_factory=dict)
    as_stored: frozenset[str] = frozenset()  # layers whose schemes take the codes of a quantized checkpoint as they are
    # Weights are floats as they were saved, or float32 as asked for: the cache is to be no narrower.
    exact: bool = False

    def of(self, name: str) -> QuantScheme:
        return self.named.get(name, self.default)

    @classmethod
    def inside(cls, scheme: QuantScheme) -> Schemes:
        """One for all layers. The head stays dense, as the embedding does: errors there reach the logits undamped."""
        from tokenmill.quant.schemes.dense import Dense  # which is a QuantScheme

        return cls(scheme, {"lm_head": Dense()})
