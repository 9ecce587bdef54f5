"""compressed-tensors checkpoints: integers, packed or not, and float8, each layer as the config's groups say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.errors import ModelError
from tokenmill.model.weights.quantized.matrix import Matrix, MatrixFormat, centred, fields
from tokenmill.model.weights.quantized.parts import FLOATS, INTEGERS, Parts
from tokenmill.model.weights.quantized.scales import input_scale, scale_of_blocks, scale_of_rows
from tokenmill.model.weights.quantized.settings import Settings, fits_any

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_STRATEGIES = ("tensor", "channel", "group", "block")
_HINT = "use a checkpoint of 4- or 8-bit integers or 8-bit floats, a GGUF file, or the original one"
_PACKED = "weight_packed"


@dataclass(frozen=True)
class Scheme:
    """What one group of the config says."""

    targets: list[str]
    bits: int
    floating: bool
    strategy: str
    group: int  # columns that share a scale, for the strategy "group"
    block: tuple[int, int]  # for the strategy "block"
    symmetric: bool
    inputs: str | None
    static: bool  # inputs have one scale, which is in the file
    coarse: bool  # the config asks for a rounding of inputs that is left out


class CompressedTensors:
    method = "compressed-tensors"
    parts = frozenset(
        {
            "weight",
            _PACKED,
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "input_scale",
            "input_zero_point",
        }
    )

    def __init__(self, config: dict[str, Any]) -> None:
        self.settings = settings = Settings(self.method, config)
        _check_format(settings)
        if settings.has("transform_config"):
            settings.refuse("transform_config", "use a checkpoint without transforms")
        sparsity = settings.inner("sparsity_config")
        if sparsity is not None and sparsity.raw.get("format") not in (None, "dense"):
            sparsity.refuse("format", "use a checkpoint that is not sparse")
        groups = settings.inner("config_groups")
        if groups is None:
            raise ModelError("the checkpoint is quantized with compressed-tensors, but its config has no config_groups")
        self._ignored = settings.words("ignore")
        found = [_scheme(inner) for name in groups.raw if (inner := groups.inner(name)) is not None]
        self._schemes = [scheme for scheme in found if scheme is not None]

    def is_stored(self, parts: set[str]) -> bool:
        return _PACKED in parts or {"weight", "weight_scale"} <= parts

    def covers(self, module: str) -> bool:
        return self._of(module) is not None

    def expects(self, module: str) -> bool:
        return self.covers(module)

    def note(self) -> str | None:
        if any(scheme.coarse for scheme in self._schemes):
            return "inputs are not rounded where the config asks for more than 8 bits per token or per layer"
        return None

    def kind(self, parts: Parts) -> MatrixFormat:
        scheme = self._scheme(parts)
        shape = parts.check(*_shape(parts, scheme))
        columns = shape[1]
        group = {"group": scheme.group, "block": scheme.block[1]}.get(scheme.strategy, columns)
        group = min(group, columns)
        where = parts.group_of("weight_g_idx", columns, math.ceil(columns / group), group)
        return MatrixFormat(
            shape, scheme.bits, group, scheme.floating, not scheme.symmetric, where is not None, inputs=scheme.inputs
        )

    def read(self, parts: Parts, kind: MatrixFormat) -> Matrix:
        scheme, (rows, columns) = self._scheme(parts), kind.shape
        groups = math.ceil(columns / kind.group)
        if scheme.strategy == "group":
            scale = parts.take("weight_scale", FLOATS, (rows, groups))
        elif scheme.strategy == "block":
            scale = scale_of_blocks(parts, "weight_scale", kind.shape, scheme.block)
        else:
            scale = scale_of_rows(parts, "weight_scale", rows)
        return Matrix(
            kind,
            _codes(parts, kind),
            scale,
            _zeros(parts, kind, groups),
            parts.group_of("weight_g_idx", columns, groups, kind.group),
            input_scale(parts, "input_scale" if scheme.static else None),
        )

    def _scheme(self, parts: Parts) -> Scheme:
        scheme = self._of(parts.module)
        assert scheme is not None  # or the module would have been refused
        return scheme

    def _of(self, module: str) -> Scheme | None:
        """A layer's own name counts before the name of its class, which here is always Linear."""
        if fits_any(self._ignored, module, self.method) or "Linear" in self._ignored:
            return None
        for scheme in self._schemes:
            if fits_any(scheme.targets, module, self.method):
                return scheme
        return next((scheme for scheme in self._schemes if "Linear" in scheme.targets), None)


def _check_format(settings: Settings) -> None:
    settings.word("format", _FORMATS, "dense", _HINT)


def _scheme(settings: Settings) -> Scheme | None:
    """None: the group is about something else than weights."""
    if settings.has("format"):
        _check_format(settings)
    weights = settings.inner("weights")
    if weights is None:
        return None
    bits, floating = weights.whole("num_bits", 8), weights.word("type", ("int", "float"), "int") == "float"
    if bits not in ((8,) if floating else (4, 8)):
        weights.refuse("num_bits", _HINT)
    group = weights.whole("group_size", -1)
    strategy = weights.word("strategy", _STRATEGIES, "group" if group > 0 else "channel", _HINT)
    if strategy == "group" and group < 1:
        weights.refuse("group_size", "it must be at least 1")
    symmetric = weights.flag("symmetric", True)
    if not symmetric and (floating or strategy == "block"):
        weights.refuse("symmetric", _HINT)
    block = weights.pair("block_structure") if strategy == "block" else (1, 1)
    inputs, static, coarse = _inputs(settings, floating, bits)
    if strategy in ("group", "block") and inputs is not None:
        inputs, static, coarse = None, False, True
    return Scheme(settings.words("targets"), bits, floating, strategy, group, block, symmetric, inputs, static, coarse)


def _inputs(settings: Settings, floating: bool, bits: int) -> tuple[str | None, bool, bool]:
    """How inputs are rounded, whether their scale is in the file, and whether the config asks for something else."""
    inputs = settings.inner("input_activations")
    if inputs is None:
        return None, False, False
    dynamic = inputs.raw.get("dynamic", False) is True
    known = (
        inputs.raw.get("num_bits", 8) == 8
        and bits == 8
        and inputs.raw.get("type", "int") == ("float" if floating else "int")
        and inputs.raw.get("symmetric", True) is True
        and inputs.raw.get("strategy") in (("token", "tensor", None) if dynamic else ("tensor", None))
    )
    if not known:
        return None, False, True
    return "fp8" if floating else "int8", not dynamic, False


def _shape(parts: Parts, scheme: Scheme) -> tuple[int, int]:
    if not parts.has(_PACKED):
        rows, columns = parts.take("weight", (_code_dtype(scheme.floating),)).shape
        return rows, columns
    if scheme.floating:
        raise ModelError(f"tensor {parts.names[_PACKED]!r} holds packed integers, but config.json says float8")
    rows, packed = parts.take(_PACKED, (torch.int32,)).shape
    given = parts.take("weight_shape", INTEGERS, (2,)).tolist()
    if given[0] != rows or math.ceil(given[1] * scheme.bits / 32) != packed:
        raise ModelError(
            f"tensor {parts.names['weight_shape']!r} says {given}, but {parts.names[_PACKED]!r} has shape"
            f" {[rows, packed]}, which is {scheme.bits} bits of another size; check config.json, or download it again"
        )
    return rows, int(given[1])


def _codes(parts: Parts, kind: MatrixFormat) -> torch.Tensor:  # [rows, columns]
    rows, columns = kind.shape
    if parts.has(_PACKED):
        words = parts.take(_PACKED, (torch.int32,), (rows, math.ceil(columns * kind.bits / 32)))
        return centred(fields(words, kind.bits).flatten(1)[:, :columns].contiguous(), kind.bits)
    codes = parts.take("weight", (_code_dtype(kind.floating),), kind.shape)
    if kind.bits == 4 and bool(((codes < -8) | (codes > 7)).any()):
        raise ModelError(f"tensor {parts.names['weight']!r} holds numbers of more than the 4 bits of config.json")
    return codes


def _zeros(parts: Parts, kind: MatrixFormat, groups: int) -> torch.Tensor | None:  # [rows, groups] int8
    rows, part = kind.shape[0], "weight_zero_point"
    if not kind.zeros:
        if parts.has(part) and bool(parts.read(parts.names[part]).float().any()):
            raise ModelError(f"tensor {parts.names[part]!r} is not zero, but config.json says that it is symmetric")
        return None
    if not parts.has(part) or parts.read(parts.names[part]).dtype == torch.int8:
        plain = ((rows, groups), (1,), (1, 1), ())
        zeros = parts.take(part, (torch.int8,), *plain, *([(rows,)] if groups == 1 else []))
        return zeros.reshape(-1, groups if zeros.numel() > 1 else 1).expand(rows, groups).contiguous()
    words = parts.take(part, (torch.int32,), (math.ceil(rows * kind.bits / 32), groups))  # packed along the rows
    return centred(fields(words.T, kind.bits).flatten(1)[:, :rows].T.contiguous(), kind.bits)


def _code_dtype(floating: bool) -> torch.dtype:
    return torch.float8_e4m3fn if floating else torch.int8
