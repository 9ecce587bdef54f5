"""QuantScheme: who owns the storage of a linear layer's weight and computes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from tokenmill.ops.types import Unnormed
from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.device import arrivals_for, has_small_gemm

Storage = dict[str, torch.Tensor]


@dataclass(frozen=True)
class QuantizedRows:
    """Activations that are float8 or int8 already, with a scale per row: what a fused norm or activation hands over."""

    values: torch.Tensor  # [..., in] float8 or int8
    scale: torch.Tensor  # [...] float32
    dtype: torch.dtype  # of the model, and so of the product

    def widen(self) -> torch.Tensor:  # [..., in]
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return (self.values.to(wide) * self.scale[..., None]).to(self.dtype)


Rows = torch.Tensor | QuantizedRows | Unnormed  # [..., in]


class QuantScheme(Protocol):
    """How a [out, in] matrix is stored and multiplied.

    A scheme holds no tensors: it allocates a storage, which the linear layer then owns and passes back.
    Rows arrive in any order while loading, each exactly once; `matmul` is called only when all have arrived.
    """

    name: str

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage: ...

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Bytes of such a matrix, for the memory plan."""
        ...

    def input_bytes(self, columns: int) -> int:
        """Bytes per token of the copy that `matmul` makes of its input."""
        ...

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        """Whether `matmul` would quantize so many rows itself: whoever makes them may then hand them over quantized."""
        ...

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        """Store weight [n, in] as rows first_row, ..., converting it to the storage's own form and device."""
        ...

    def matmul(
        self,
        x: torch.Tensor | QuantizedRows,  # [..., in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:  # [..., out]
        ...


@runtime_checkable
class TakesGroups(Protocol):
    """A scheme that stores what a quantized checkpoint holds without rounding it again."""

    def write_groups(self, storage: Storage, first_row: int, groups: Groups) -> None: ...


@runtime_checkable
class FusesOneRow(Protocol):
    """A scheme whose product of one row takes in the norm before it, and the activation behind it."""

    def fuses(self, storage: Storage, dtype: torch.dtype, gated: bool = False) -> bool: ...

    def fused(
        self,
        x: torch.Tensor | Unnormed,  # [1, in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
        act: str = "",  # "silu" or "gelu_tanh": the first half of the result gates the second
    ) -> torch.Tensor:  # [1, out] or [1, out / 2]
        ...


class Dense:
    """The weight as it is, in the model's dtype or in one of its own, in which it is then multiplied."""

    name = "dense"

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        if dtype is not None:
            self.name = f"dense {str(dtype).removeprefix('torch.')}"

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        weight = torch.empty(rows, columns, dtype=self.dtype or dtype, device=device)
        return {"weight": weight, **arrivals_for(rows, device)}

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns * (self.dtype or dtype).itemsize

    def input_bytes(self, columns: int) -> int:
        return 0 if self.dtype is None else columns * self.dtype.itemsize

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        return False

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        storage["weight"][first_row : first_row + weight.shape[0]].copy_(weight)

    def matmul(self, x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        weight = storage["weight"]
        if isinstance(x, QuantizedRows):
            x = x.widen()
        if x.dtype != weight.dtype:
            wide = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
            return wide.to(x.dtype)
        if x.dim() == 2 and has_small_gemm(x.device):
            from tokenmill.ops.triton.gemm_small import beats_library, small_gemm

            if beats_library(x, weight):
                return small_gemm(x, weight, bias, arrivals=storage.get("arrivals"))
        return F.linear(x, weight, bias)


@dataclass(frozen=True)
class Linear:
    """A linear layer: a scheme, its storage, and a bias in the model's dtype."""

    scheme: QuantScheme
    storage: Storage
    bias: torch.Tensor | None = None

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.fused(x) if isinstance(x, Unnormed) else self.scheme.matmul(x, self.storage, self.bias)

    def fuses(self, rows: int, dtype: torch.dtype, gated: bool = False) -> bool:
        """Whether `fused` may be called for so many rows; gated: with an activation."""
        return rows == 1 and isinstance(self.scheme, FusesOneRow) and self.scheme.fuses(self.storage, dtype, gated)

    def fused(self, x: torch.Tensor | Unnormed, act: str = "") -> torch.Tensor:
        assert isinstance(self.scheme, FusesOneRow)
        return self.scheme.fused(x, self.storage, self.bias, act)

    def wants_quantized(self, rows: int, dtype: torch.dtype) -> bool:
        return self.scheme.wants_quantized(self.storage, rows, dtype)


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
        return cls(scheme, {"lm_head": Dense()})
