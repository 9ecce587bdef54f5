"""GPTQ checkpoints: integers packed along the inputs, zero points less one or not, columns in any order."""

from __future__ import annotations

import math
from typing import Any

import torch

from tokenmill.errors import ModelError
from tokenmill.model.weights.quantized.checkpoint import Format
from tokenmill.model.weights.quantized.matrix import Matrix, MatrixFormat, centred, fields
from tokenmill.model.weights.quantized.parts import FLOATS, Parts
from tokenmill.model.weights.quantized.settings import Settings, fits_regular

_HINT = "use a checkpoint of 4 or 8 bits, a GGUF file, or the original one"


class GPTQ(Format):
    method = "gptq"
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, config: dict[str, Any]) -> None:
        self.settings = Settings(self.method, config)
        # Files of the first format hold zero points less one; symmetric ones were written so, too.
        version = self.settings.word(
            "checkpoint_format", ("gptq", "gptq_v2"), "gptq", "use one whose checkpoint_format is gptq or gptq_v2"
        )
        self._less_one = version == "gptq"
        if self.settings.has("is_marlin_format"):
            self.settings.refuse("is_marlin_format", "use a checkpoint in the plain GPTQ format")
        if self.settings.raw.get("pack_dtype") not in (None, "int32"):
            self.settings.refuse("pack_dtype", "use a checkpoint that is packed in int32")
        self._layers = [
            (pattern, self.settings if excluded else Settings(self.method, config | changes), excluded)
            for pattern, changes, excluded in _overrides(self.settings)
        ]
        for settings in (self.settings, *(settings for _, settings, _ in self._layers)):
            _bits(settings), _group(settings, 1), settings.flag("sym", True)

    def is_stored(self, parts: set[str]) -> bool:
        return "qweight" in parts

    def covers(self, module: str) -> bool:
        return self._of(module) is not None

    def kind(self, parts: Parts) -> MatrixFormat:
        settings = self._settings(parts)
        bits = _bits(settings)
        packed, rows = parts.take("qweight", (torch.int32,)).shape  # [columns * bits / 32, rows]
        columns = packed * (32 // bits)
        shape = parts.check(rows, columns)
        group = _group(settings, columns)
        where = parts.group_of("g_idx", columns, math.ceil(columns / group), group)
        return MatrixFormat(shape, bits, group, zeros=not settings.flag("sym", True), shuffled=where is not None)

    def read(self, parts: Parts, kind: MatrixFormat) -> Matrix:
        (rows, columns), bits = kind.shape, kind.bits
        groups, per_word = math.ceil(columns / kind.group), 32 // bits
        words = parts.take("qweight", (torch.int32,), (columns // per_word, rows))
        codes = fields(words.T, bits).flatten(1)  # [rows, columns]
        scale = parts.take("scales", FLOATS, (groups, rows)).T.contiguous()
        packed = parts.take("qzeros", (torch.int32,), (groups, math.ceil(rows / per_word)))
        if self._less_one:
            # The one was subtracted from whole words: a zero point of 0 has borrowed from its neighbour.
            packed = packed + (0x11111111 if bits == 4 else 0x01010101)
        zeros = centred(fields(packed, bits).flatten(1)[:, :rows].T.contiguous(), bits)  # [rows, groups]
        if not kind.zeros and bool(zeros.any()):
            raise ModelError(
                f"tensor {parts.names['qzeros']!r} holds other zero points than a symmetric layer has, although"
                " config.json says sym=true; check its checkpoint_format (gptq or gptq_v2)"
            )
        where = parts.group_of("g_idx", columns, groups, kind.group)
        return Matrix(kind, centred(codes, bits), scale, zeros if kind.zeros else None, where)

    def _settings(self, parts: Parts) -> Settings:
        settings = self._of(parts.module)
        assert settings is not None  # or the module would have been refused
        return settings

    def _of(self, module: str) -> Settings | None:
        """The settings of a module; None: the config leaves it out."""
        for pattern, settings, excluded in self._layers:
            if fits_regular(pattern, module, self.method):
                return None if excluded else settings
        return self.settings


def _overrides(settings: Settings) -> list[tuple[str, dict[str, Any], bool]]:
    """(pattern, changed settings, whether such layers are left out) of "dynamic"; the first that fits counts."""
    if not settings.has("dynamic"):
        return []
    dynamic, found = settings.inner("dynamic"), []
    assert dynamic is not None
    for pattern, changes in dynamic.raw.items():
        excluded = pattern.startswith("-:")
        if not excluded and not isinstance(changes, dict):
            dynamic.refuse(pattern, "it must be a JSON object")
        found.append((pattern.removeprefix("-:").removeprefix("+:"), {} if excluded else changes, excluded))
    return found


def _bits(settings: Settings) -> int:
    bits = settings.whole("bits")
    if bits not in (4, 8):
        settings.refuse("bits", _HINT)
    return bits


def _group(settings: Settings, columns: int) -> int:
    group = settings.whole("group_size", -1)
    if group == 0:
        settings.refuse("group_size", "it must be -1 or at least 1")
    return columns if group == -1 else group
