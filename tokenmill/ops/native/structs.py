"""The argument structs of the native ops, field by field: src/matrix.h, routing.h, attention.h, elementwise.h,
low_rank.h and exchange.h."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, ClassVar

import torch

from tokenmill.ops.native.library import Library

MAX_SEGMENTS = 4  # src/formats.h
MAX_SECTIONS = 3  # src/low_rank.h
VERBS = ("all_reduce", "all_gather", "all_to_all", "barrier", "send", "receive")  # src/exchange.h
_STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


def storage_of(tensor: torch.Tensor) -> int:
    return _STORAGE[tensor.dtype]


def _fields(pointers: str, numbers: str, reals: str = "") -> list[tuple[str, type]]:
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (reals, ctypes.c_double))
    return [(name, kind) for names, kind in kinds for name in names.split()]


_NUMBERS = (int, float)


class Args(ctypes.Structure):
    """Plain data: a tensor or an array is given as its address. A pointer that is not given is null, a number 0."""

    KIND: ClassVar[int]

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if type(value) not in _NUMBERS and value is not None and not isinstance(value, ctypes.Structure):
                values[name] = value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
        super().__init__(**values)


class Segment(ctypes.Structure):
    _fields_ = _fields("panels", "rows form")


class MatmulArgs(Args):
    KIND = 1
    _fields_ = [
        *_fields("x", "x_stride"), *_fields("out", "out_stride"), *_fields("bias", "m k num_segments"),
        ("segments", Segment * MAX_SEGMENTS),
    ]  # fmt: skip


class RepackArgs(Args):
    KIND = 2
    _fields_ = _fields("source order book panels", "rows columns format")


class TakeRowsArgs(Args):
    KIND = 3
    _fields_ = [*_fields("ids out", "out_stride m k first num_segments"), ("segments", Segment * MAX_SEGMENTS)]


class UnpackArgs(Args):
    KIND = 6
    _fields_ = _fields("source order book out", "rows columns format storage")


class RoundArgs(Args):
    KIND = 7
    _fields_ = _fields("source blocks", "rows columns group format storage")


class ExpertMatrix(ctypes.Structure):
    _fields_ = [("num_segments", ctypes.c_int64), ("segments", Segment * MAX_SEGMENTS)]


class ExpertsArgs(Args):
    KIND = 8
    _fields_ = _fields(
        "x share chosen gate_up down out", "x_stride out_stride rows top_k experts hidden inner activation"
    )


class NormArgs(Args):
    KIND = 64
    _fields_ = _fields(
        "x residual weight total out",
        "rows dim x_stride residual_stride total_stride out_stride weight_storage",
        "eps",
    )


class RopeArgs(Args):
    KIND = 65
    _fields_ = _fields(
        "q k v table positions slots k_cache v_cache q_norm k_norm k_scales v_scales",
        "tokens heads kv_heads dim v_dim rotated block_size "
        "q_token q_head k_token k_head v_token v_head "
        "k_block k_slot k_cache_head v_block v_slot v_cache_head "
        "k_scale_block k_scale_slot k_scale_head v_scale_block v_scale_slot v_scale_head cache_storage norm_storage",
        "eps",
    )


class ActArgs(Args):
    KIND = 66
    _fields_ = _fields("x out", "rows inner x_stride out_stride kind")


class EmbedArgs(Args):
    KIND = 67
    _fields_ = _fields("ids table out", "rows vocab dim out_stride table_storage", "scale")


class AddArgs(Args):
    KIND = 68
    _fields_ = _fields("x y out", "rows dim x_stride y_stride out_stride")


class DecodeInputArgs(Args):
    KIND = 69
    _fields_ = _fields(
        "rows starts tokens blocks ids slots table_rows context", "n token_stride block_stride block_size"
    )


class ChooseArgs(Args):
    KIND = 70
    _fields_ = _fields("logits out on table_row starts tokens bests", "rows vocab stride token_stride first")


class PickArgs(Args):
    KIND = 72
    _fields_ = _fields("bests out on table_row starts tokens", "rows ranks rank_stride token_stride")


class RouteArgs(Args):
    KIND = 73
    _fields_ = _fields(
        "x router shares chosen", "rows hidden experts x_stride top_k groups top_groups normalize", "scale"
    )


class HeadsArgs(Args):
    KIND = 74
    _fields_ = _fields(
        "x weight beside out",
        "rows heads rows_of_weight columns transposed width_beside "
        "x_stride x_head beside_stride beside_head out_stride out_head",
    )


class MapArgs(Args):
    KIND = 71
    _fields_ = _fields("x out", "rows dim x_stride out_stride kind", "value")


class LowRankArgs(Args):
    KIND = 75
    _fields_ = [
        *_fields("x out adapter down up ranks", "tokens columns rows rank sections x_stride out_stride storage"),
        ("ends", ctypes.c_int64 * MAX_SECTIONS),
    ]  # fmt: skip


class AttentionArgs(Args):
    KIND = 80
    _fields_ = _fields(
        "q k v out rows q_start context tables tree k_scales v_scales counts",
        "n singles heads kv_heads k_dim v_dim block_size "
        "q_token q_head out_token out_head "
        "k_block k_slot k_head v_block v_slot v_head table_row tree_stride "
        "k_scale_block k_scale_slot k_scale_head v_scale_block v_scale_slot v_scale_head "
        "window cache_storage",
        "softcap scale",
    )


class Group(ctypes.Structure):
    """src/exchange.h: one rank's end of a group that shares memory."""

    _fields_ = [
        *_fields("ended filled slots rings bytes_of_rings", "rank size slot_bytes ring_bytes looks round"),
        ("counts", ctypes.c_int64 * len(VERBS)),
        ("bytes", ctypes.c_int64 * len(VERBS)),
    ]


class SumArgs(Args):
    KIND = 90
    _fields_ = _fields("group x", "rows dim")


class ExchangeArgs(Args):
    KIND = 91
    _fields_ = _fields("group x out", "rows row_bytes x_part out_part verb")


class EnterArgs(Args):
    KIND = 92
    _fields_ = _fields("told there", "layer bell")


class FetchArgs(Args):
    KIND = 93
    _fields_ = _fields(
        "told slot buffer owner used early chosen places", "number experts slots rows top_k is_last bell"
    )


class ForeseeArgs(Args):
    KIND = 94
    _fields_ = [("route", RouteArgs), *_fields("told wish slot", "bell")]


@lru_cache
def check_structs(native: Library) -> None:
    """That both sides mean the same."""
    for struct in Args.__subclasses__():
        native.check(struct.KIND, struct)
    if native.c.tm_group_bytes() != ctypes.sizeof(Group):
        raise ValueError(f"Group has {ctypes.sizeof(Group)} bytes here and {native.c.tm_group_bytes()} there")
