"""Keys and values in eight or four bits: the forms of a quantized KV cache, how a head is written and how it is read.

A head of one token is quantized by itself, so that what is stored depends on its own values alone: not on its block,
its chunk or what else a step computes. Scales are rounded to bfloat16 before the codes are computed, so that writing is
a pure function and a code times its scale is exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.errors import ConfigError

INT4_GROUP = 32  # channels that share a scale and a minimum
LEAST_SCALE = 1e-30  # below it a group holds nothing but zeros: its scale is one


@dataclass(frozen=True)
class KVForm:
    """How a head of keys or values is stored: codes, and beside them bfloat16 scales."""

    name: str  # int8, fp8 or int4
    dtype: torch.dtype  # of the codes; every form has its own
    largest: float  # of a code
    bits: int

    def width(self, dim: int) -> int:
        """Codes of a head of `dim` channels: two channels share a byte in int4."""
        return dim * self.bits // 8

    def dim(self, width: int) -> int:
        """Channels of a head that has `width` codes."""
        return width * 8 // self.bits

    def groups(self, dim: int) -> int:
        return dim // min(INT4_GROUP, dim) if self.name == "int4" else 1

    def scales(self, dim: int) -> int:
        """Numbers beside a head's codes: its scale; in int4 the scales of its groups, then their minima."""
        return 2 * self.groups(dim) if self.name == "int4" else 1

    def head_bytes(self, dim: int) -> int:
        """What a head of one token takes, scales included."""
        return self.width(dim) + 2 * self.scales(dim)

    def check(self, dim: int) -> None:
        if self.name == "int4" and (dim % 2 or dim % min(INT4_GROUP, dim)):
            raise ConfigError(
                f"kv_cache_dtype 'int4' stores heads of a multiple of {INT4_GROUP} channels; this model's have {dim}"
            )


INT8 = KVForm("int8", torch.int8, 127.0, 8)
FP8 = KVForm("fp8", torch.float8_e4m3fn, 448.0, 8)
INT4 = KVForm("int4", torch.uint8, 15.0, 4)
KV_FORMS = {form.name: form for form in (INT8, FP8, INT4)}
_BY_DTYPE = {form.dtype: form for form in KV_FORMS.values()}


@dataclass(frozen=True)
class KVScales:
    """What stands beside the codes of one layer: [blocks, block_size, kv_heads, n] bfloat16, for keys and for values.

    n is 1 in int8 and fp8; in int4 it is twice the number of groups: their scales, then their minima.
    """

    k: torch.Tensor
    v: torch.Tensor


def form_for(dtype: torch.dtype) -> KVForm | None:
    """The form whose codes have this type; None: a cache of this type holds floats."""
    return _BY_DTYPE.get(dtype)


def form_of(codes: torch.Tensor) -> KVForm:
    """The form of a cache, told by the type of its codes."""
    return _BY_DTYPE[codes.dtype]


def channels(cache: torch.Tensor) -> int:
    """Of a head in a cache of floats or codes."""
    width = cache.shape[-1]
    return _BY_DTYPE[cache.dtype].dim(width) if cache.dtype in _BY_DTYPE else width


def quantize(
    x: torch.Tensor,  # [..., dim] floats
    form: KVForm,
) -> tuple[torch.Tensor, torch.Tensor]:  # codes [..., width], scales [..., n] bfloat16
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if form.name == "int4":
        return _quantize_int4(wide)
    scale = _scale(wide.abs().amax(-1, keepdim=True), form.largest)
    codes = (wide / scale.to(wide.dtype)).clamp(-form.largest, form.largest)
    if form.name == "int8":
        codes = codes.round()  # halves to the even neighbour
    return codes.to(form.dtype), scale


def dequantize(
    codes: torch.Tensor,  # [..., width]
    scales: torch.Tensor,  # [..., n] bfloat16
    dtype: torch.dtype,  # float32 and float64 hold code * scale exactly
) -> torch.Tensor:  # [..., dim]
    """The floats that a cache stands for; this is what every attention reads."""
    form = form_of(codes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if form.name != "int4":
        return (codes.to(wide) * scales.to(wide)).to(dtype)
    by_group = _grouped(torch.cat([codes & 15, codes >> 4], dim=-1).to(wide))
    scale, low = scales.to(wide)[..., None].chunk(2, dim=-2)
    return (by_group * scale + low).flatten(-2).to(dtype)


def gather(
    cache: torch.Tensor,  # [n, ..., dim], or codes
    scales: torch.Tensor | None,  # [n, ..., m], where they are codes
    where: torch.Tensor,  # [k]
    dtype: torch.dtype,
) -> torch.Tensor:  # [k, ..., dim]
    """Some blocks or tokens of a cache, as floats; always a copy."""
    found = cache.index_select(0, where)
    return found.to(dtype) if scales is None else dequantize(found, scales.index_select(0, where), dtype)


def _quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte d holds channel d in its low half and channel d + dim / 2 in its high half."""
    grouped = _grouped(x)
    low = -_round_up(-grouped.amin(-1, keepdim=True))
    scale = _scale(grouped.amax(-1, keepdim=True) - low.to(x.dtype), INT4.largest)
    codes = ((grouped - low.to(x.dtype)) / scale.to(x.dtype)).round().clamp(0, INT4.largest)
    first, second = codes.flatten(-2).to(torch.uint8).chunk(2, dim=-1)
    return first | (second << 4), torch.cat([scale, low], dim=-2).squeeze(-1)


def _grouped(x: torch.Tensor) -> torch.Tensor:  # [..., dim] -> [..., groups, dim / groups]
    return x.reshape(*x.shape[:-1], INT4.groups(x.shape[-1]), -1)


def _scale(extent: torch.Tensor, largest: float) -> torch.Tensor:
    """The least bfloat16 that is not below extent / largest; one where there is nothing to scale."""
    extent = extent.to(torch.float32)
    scale = extent / torch.full_like(extent, largest)  # a GPU would multiply with a number's reciprocal: another result
    return torch.where(scale < LEAST_SCALE, torch.ones_like(scale, dtype=torch.bfloat16), _round_up(scale))


def _round_up(x: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 that is not below x (of any sign). What is not finite stays so."""
    x = x.to(torch.float32)
    near = x.to(torch.bfloat16)
    step = torch.where(near >= 0, 1, -1).to(torch.int16)  # towards larger numbers, in the order of the bits
    return torch.where(near.to(torch.float32) < x, (near.view(torch.int16) + step).view(torch.bfloat16), near)
