"""QuantizedCheckpoint: a public quantized checkpoint under plain names, as floats or as the numbers that it stores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from tokenmill.errors import ModelError
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.checkpoint import Checkpoint, PartCheckpoint, TypedCheckpoint
from tokenmill.model.weights.names import recipes, spelled_as_in_transformers
from tokenmill.model.weights.quantized.matrix import Matrix, MatrixFormat
from tokenmill.model.weights.quantized.parts import Parts
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.groups import Groups

# Scales for a cache of keys and values in 8 bits: this engine's own have a scale for each token.
_OF_CACHE = frozenset(
    f"{of}{what}" for of in ("k_", "v_", "q_", "kv_", "prob_", "output_") for what in ("scale", "zero_point")
)


class Format(Protocol):
    """One public format. A module is a layer's name without the ".weight"."""

    method: str
    parts: frozenset[str]  # what the tensors of a quantized layer are called, after its name

    def is_stored(self, parts: set[str]) -> bool:
        """Whether these tensors of a module are a quantized matrix."""
        ...

    def covers(self, module: str) -> bool:
        """Whether the config says how this layer is quantized; if not, it must not be."""
        ...

    def expects(self, module: str) -> bool:
        """Whether a linear layer of floats is worth a note; not where tools leave some without further notice."""
        return False

    def note(self) -> str | None:
        """What of the config is not followed to the letter."""
        return None

    def kind(self, parts: Parts) -> MatrixFormat:
        """How a covered layer is stored, without reading its codes."""
        ...

    def read(self, parts: Parts, kind: MatrixFormat) -> Matrix: ...


class QuantizedCheckpoint:
    """Wraps a checkpoint; every tensor keeps its name, and those of a quantized layer become one, its weight."""

    def __init__(self, checkpoint: Checkpoint, form: Format) -> None:
        self.config: dict[str, Any] = checkpoint.config
        self._checkpoint, self._format = checkpoint, form
        modules = _by_module(checkpoint.names())
        stored = {module for module, parts in modules.items() if form.is_stored(set(parts))}
        wanted = _wanted_shapes(self.config, checkpoint.names(), stored)
        self._layers: dict[str, Parts] = {}  # by the name of the weight
        for module in sorted(stored):
            if not form.covers(module):
                raise ModelError(
                    f"{module!r} is stored quantized, but the {form.method} config leaves it out;"
                    " check that config.json belongs to these weights"
                )
            parts = {part: name for part, name in modules[module].items() if part in form.parts}
            weight = f"{module}.weight"
            self._layers[weight] = Parts(module, parts, checkpoint.tensor, wanted.get(weight))
        self._plain, self._cache_scales = self._others(modules, stored, wanted)
        if not self._layers:
            raise ModelError(
                f"config.json says that the checkpoint is quantized with {form.method}, but it holds no such tensors;"
                " check that config.json belongs to these weights"
            )

    @property
    def method(self) -> str:
        """The format's name, as config.json has it."""
        return self._format.method

    def names(self) -> list[str]:
        return [*self._plain, *self._layers]

    def tensor(self, name: str) -> torch.Tensor:
        """Quantized layers as float32."""
        if name not in self._layers:
            return self._checkpoint.tensor(name)
        return self._matrix(name).widen()

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._layers:
            return self._kind(name).shape
        if isinstance(self._checkpoint, PartCheckpoint):
            return self._checkpoint.shape(name)
        return tuple(self._checkpoint.tensor(name).shape)

    def part(self, name: str, box: tuple[range, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of a quantized layer all is read: formats pack along either dimension."""
        if name not in self._layers and isinstance(self._checkpoint, PartCheckpoint):
            return self._checkpoint.part(name, box, dtype)
        return self.tensor(name)[tuple(slice(span.start, span.stop) for span in box)]

    def dtype(self, name: str) -> torch.dtype | None:
        if name in self._layers:
            return torch.float32
        return self._checkpoint.dtype(name) if isinstance(self._checkpoint, TypedCheckpoint) else None

    def stored(self, name: str) -> WeightForm | None:
        return self._kind(name).form if name in self._layers else None

    def groups(self, name: str) -> Groups | None:
        return self._matrix(name).groups() if name in self._layers else None

    def notes(self) -> list[str]:
        kinds = {name: self._kind(name) for name in self._layers}
        shuffled = [name for name, kind in kinds.items() if kind.shuffled]
        odd = [name for name, kind in kinds.items() if kind.form is None and not kind.shuffled]
        plain = [name for name in self._plain if name.endswith("_proj.weight")]
        floats = [name for name in plain if self._format.expects(name.removesuffix(".weight"))]
        said = [self._format.note()]
        if shuffled:
            said.append(f"{_some(shuffled)} held as floats: columns are in the order of activations (desc_act)")
        if odd:
            said.append(f"{_some(odd)} held as floats: no kernel takes such groups or zero points")
        if floats:
            said.append(f"{_some(floats)} stored as floats, although the config says otherwise")
        if self._cache_scales:
            said.append("its scales for the KV cache are not used; kv_cache_dtype says how that is kept")
        return [f"checkpoint   {self._format.method}: {line}" for line in said if line]

    def _kind(self, name: str) -> MatrixFormat:
        return self._format.kind(self._layers[name])

    def _matrix(self, name: str) -> Matrix:
        matrix = self._format.read(self._layers[name], self._kind(name))
        if not bool(matrix.scale.isfinite().all()):
            raise ModelError(
                f"the scales of {name!r} hold what is no finite number; the file is damaged: download it again"
            )
        return matrix

    def _others(
        self, modules: dict[str, dict[str, str]], stored: set[str], wanted: dict[str, tuple[int, ...]]
    ) -> tuple[list[str], bool]:
        """The tensors that are no part of a quantized layer, and whether scales of the cache were left out."""
        plain, cache_scales = [], False
        for module, parts in modules.items():
            for part, name in parts.items():
                if part in _OF_CACHE:
                    cache_scales = True
                elif module not in stored or part not in self._format.parts:
                    plain.append(name)
        # Some tools give every layer a bias; where the model has none, it must be zero.
        empty = {
            f"{module}.bias"
            for module in stored
            if (bias := modules[module].get("bias")) and bias not in wanted
            if not bool(self._checkpoint.tensor(bias).any())
        }
        return [name for name in plain if name not in empty], cache_scales


def _by_module(names: Iterable[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        found.setdefault(module, {})[part] = name
    return found


def _wanted_shapes(config: dict[str, Any], names: list[str], stored: set[str]) -> dict[str, tuple[int, ...]]:
    """The shape that config.json implies for each weight and bias, under the names of this checkpoint."""
    ways = [way for ways in recipes(spec_from_config(config)).values() for way in ways]
    shapes = {piece.source: piece.shape for way in ways for piece in way}
    spelled = spelled_as_in_transformers([*names, *(f"{module}.weight" for module in stored)])
    return {theirs: shapes[ours] for ours, theirs in spelled.items() if ours in shapes}


def _some(names: list[str]) -> str:
    first = names[0].removesuffix(".weight")
    return f"{first} is" if len(names) == 1 else f"{first} and {len(names) - 1} more layers are"
