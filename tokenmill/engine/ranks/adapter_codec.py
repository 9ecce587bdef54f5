"""Adapters as bytes on the ring of steps, so that every rank writes them into a slot between the same two steps.

[ no integers, no parts: it is no step | length of the text | slot, dtype and factors as JSON | their tensors ]
"""

from __future__ import annotations

import json
import struct

import torch

from tokenmill.model.adapters.peft import AdapterWeights, Factors, Section

_HEAD = struct.Struct("<QQQ")
_NO_STEP = struct.Struct("<QQ").pack(0, 0)  # every step has integers, or parts
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {str(one).removeprefix("torch."): one for one in _FLOATS}


def is_adapter(message: bytes) -> bool:
    return message.startswith(_NO_STEP)


def encode_adapter(slot: int, weights: AdapterWeights) -> bytes:
    described, tensors = [], []
    for one in weights.factors:
        at = one.section
        described.append((at.linear, at.number, at.first, at.last, *one.down.shape))
        tensors += [one.down, one.up]
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    text = json.dumps({"slot": slot, "key": weights.key, "dtype": dtype, "factors": described}).encode()
    return b"".join((_HEAD.pack(0, 0, len(text)), text, *(one.view(torch.uint8).numpy().tobytes() for one in tensors)))


def decode_adapter(message: bytes) -> tuple[int, AdapterWeights]:
    length = _HEAD.unpack_from(message)[2]
    said = json.loads(message[_HEAD.size : _HEAD.size + length])
    left = torch.frombuffer(bytearray(message[_HEAD.size + length :]), dtype=_DTYPES[said["dtype"]])
    factors, at = [], 0
    for linear, number, first, last, rank, columns in said["factors"]:
        down, up = left[at : at + rank * columns], left[at + rank * columns :][: rank * (last - first)]
        at += down.numel() + up.numel()
        section = Section(linear, number, first, last)
        factors.append(Factors(section, down.view(rank, columns), up.view(rank, last - first)))
    return said["slot"], AdapterWeights(said["key"], max(len(one.down) for one in factors), tuple(factors))
