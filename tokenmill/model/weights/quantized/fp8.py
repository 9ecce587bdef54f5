"""float8 checkpoints: a scale per matrix, row or block, and for inputs one in the file or one per token."""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.model.weights.quantized.matrix import Matrix, MatrixFormat
from tokenmill.model.weights.quantized.parts import Parts
from tokenmill.model.weights.quantized.scales import input_scale, scale_of_blocks, scale_of_rows
from tokenmill.model.weights.quantized.settings import Settings, within_any

_SCALES = ("weight_scale_inv", "weight_scale")  # both are what the codes are multiplied by
_INPUTS = ("input_scale", "activation_scale")


class Fp8Files:
    method = "fp8"
    parts = frozenset({"weight", *_SCALES, *_INPUTS})

    def __init__(self, config: dict[str, Any]) -> None:
        self.settings = Settings(self.method, config)
        self.settings.word("fmt", ("e4m3",), "e4m3", "use a checkpoint whose fmt is e4m3")
        self._static = self.settings.word("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self._block = self.settings.pair("weight_block_size") if self.settings.has("weight_block_size") else None
        self._left_out = self.settings.words("modules_to_not_convert") + self.settings.words("ignored_layers")

    def is_stored(self, parts: set[str]) -> bool:
        return "weight" in parts and any(scale in parts for scale in _SCALES)

    def covers(self, module: str) -> bool:
        return not within_any(self._left_out, module)

    def expects(self, module: str) -> bool:
        return self.covers(module) and module != "lm_head"

    def note(self) -> str | None:
        return None if self._block is None else "inputs are not rounded; the checkpoint asks for float8 in groups"

    def kind(self, parts: Parts) -> MatrixFormat:
        rows, columns = parts.take("weight", (torch.float8_e4m3fn,)).shape
        shape = parts.check(rows, columns)
        if self._block is not None:  # inputs would be rounded in groups, too: finer than any form here
            return MatrixFormat(shape, 8, min(self._block[1], columns), floating=True)
        return MatrixFormat(shape, 8, columns, floating=True, inputs="fp8")

    def read(self, parts: Parts, kind: MatrixFormat) -> Matrix:
        rows, columns = kind.shape
        codes = parts.take("weight", (torch.float8_e4m3fn,), (rows, columns))
        name = next(scale for scale in _SCALES if parts.has(scale))
        if self._block is not None:
            return Matrix(kind, codes, scale_of_blocks(parts, name, kind.shape, self._block))
        given = next((part for part in _INPUTS if parts.has(part)), _INPUTS[0]) if self._static else None
        return Matrix(kind, codes, scale_of_rows(parts, name, rows), input_scale=input_scale(parts, given))
