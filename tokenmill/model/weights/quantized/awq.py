"""AWQ checkpoints: 4-bit integers packed along the outputs, in the order that its "gemm" kernels like."""

from __future__ import annotations

import math
from typing import Any

import torch

from tokenmill.model.weights.quantized.checkpoint import Format
from tokenmill.model.weights.quantized.matrix import Matrix, MatrixFormat, centred
from tokenmill.model.weights.quantized.parts import FLOATS, Parts
from tokenmill.model.weights.quantized.settings import Settings, within_any

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # output 8 w + i lies at place _PLACES[i] of word w


class AWQ(Format):
    method = "awq"
    parts = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, config: dict[str, Any]) -> None:
        spelled = {"w_bit": "bits", "q_group_size": "group_size", "checkpoint_format": "version"}  # older and newer
        config = {new: config[old] for old, new in spelled.items() if old in config} | config
        self.settings = Settings(self.method, config)
        self.settings.word("version", ("gemm",), "gemm", "use a checkpoint whose version is gemm")
        if self.settings.whole("bits") != 4:
            self.settings.refuse("bits", "use a checkpoint of 4 bits, a GGUF file, or the original one")
        self._group = self.settings.whole("group_size", -1)
        if self._group == 0:
            self.settings.refuse("group_size", "it must be -1 or at least 1")
        self._zeros = self.settings.flag("zero_point", True)
        self._left_out = self.settings.words("modules_to_not_convert")

    def is_stored(self, parts: set[str]) -> bool:
        return "qweight" in parts

    def covers(self, module: str) -> bool:
        return not within_any(self._left_out, module)

    def kind(self, parts: Parts) -> MatrixFormat:
        columns, packed = parts.take("qweight", (torch.int32,)).shape  # [columns, rows / 8]
        shape = parts.check(packed * 8, columns)
        return MatrixFormat(shape, 4, columns if self._group == -1 else self._group, zeros=self._zeros)

    def read(self, parts: Parts, kind: MatrixFormat) -> Matrix:
        rows, columns = kind.shape
        groups = math.ceil(columns / kind.group)
        codes = _unpack(parts.take("qweight", (torch.int32,), (columns, rows // 8)))
        scale = parts.take("scales", FLOATS, (groups, rows)).T.contiguous()
        zeros = None
        if kind.zeros:
            zeros = _unpack(parts.take("qzeros", (torch.int32,), (groups, rows // 8)))
        return Matrix(kind, codes, scale, zeros)


def _unpack(words: torch.Tensor) -> torch.Tensor:  # [n, rows / 8] int32 -> [rows, n] int8
    words = words.T.contiguous()  # turning words costs an eighth of turning numbers
    numbers = torch.empty(words.shape[0], 8, words.shape[1], dtype=torch.uint8)
    for output, place in enumerate(_PLACES):
        numbers[:, output] = (words >> 4 * place) & 15
    return centred(numbers.flatten(0, 1), 4)
