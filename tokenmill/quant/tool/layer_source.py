"""LayerSource: reads a checkpoint layer by layer, as the decoder's float32 parameters, and finds the way back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenmill.errors import ModelError
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.checkpoint import Checkpoint, GroupCheckpoint
from tokenmill.model.weights.names import Piece, Recipe, recipes, spelled_as_in_transformers
from tokenmill.quant.tool.joints import Params

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """The rows of a parameter that one tensor of the checkpoint holds."""

    parameter: str  # canonical: "layers.3.qkv"
    first: int
    rows: int
    piece: Piece

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of the parameter (or of its codes, or of scales), in the checkpoint's own order."""
        part = tensor[self.first : self.first + self.rows]
        if self.piece.change is None:
            return part
        if part.dim() == 1:  # a norm, stored less one: the change is the same for every value
            return part - self.piece.change(torch.zeros(1))
        order = self.piece.change(torch.arange(float(self.rows))[:, None])[:, 0].long()
        return part[order.argsort()]


class LayerSource:
    def __init__(self, spec: DecoderSpec, checkpoint: Checkpoint) -> None:
        if isinstance(checkpoint, GroupCheckpoint) or checkpoint.config.get("quantization_config"):
            raise ModelError("the checkpoint is quantized already; quantize the original one")
        self.spec = spec
        self.checkpoint = checkpoint
        self._spelled = spelled_as_in_transformers(checkpoint.names())
        self._recipes = {name: self._fitting(ways) for name, ways in recipes(spec).items()}

    def read(self, name: str) -> torch.Tensor:
        """One parameter by its canonical name, float32."""
        param = self.spec.parameters()[name]
        whole = torch.empty(param.shape)
        for piece in self._recipes[name]:
            value = self.checkpoint.tensor(self._spelled[piece.source]).float()
            if tuple(value.shape) != piece.shape:
                raise ModelError(f"tensor {piece.source!r} has shape {list(value.shape)}, not {list(piece.shape)}")
            value = piece.change(value) if piece.change else value
            target = whole if piece.expert is None else whole[piece.expert]
            target[piece.first : piece.first + value.shape[0]] = value
        return whole

    def layer(self, index: int) -> Params:
        return {name: self.read(f"layers.{index}.{name}") for name in self.spec.layer_parameters(index)}

    def parts(self, name: str) -> Iterator[tuple[str, Part]]:
        """The checkpoint's tensors that make up a vector, a matrix, or the matrices of experts, of which rows are
        counted through all. Experts that it holds stacked get names of their own: formats know no others.
        """
        param, recipe = self.spec.parameters()[name], self._recipes[name]
        stacked = param.kind == "experts" and recipe[0].expert is None
        for piece in recipes(self.spec)[name][0] if stacked else recipe:
            first = piece.first + (piece.expert or 0) * param.shape[1 if piece.expert is not None else 0]
            tensor = piece.source if stacked else self._spelled[piece.source]
            yield tensor, Part(name, first, piece.shape[0], piece)

    def tensors(self, name: str) -> set[str]:
        """What the checkpoint holds of a parameter."""
        return {self._spelled[piece.source] for piece in self._recipes[name]}

    def _fitting(self, ways: list[Recipe]) -> Recipe:
        for way in ways:
            if all(piece.source in self._spelled for piece in way):
                return way
        raise ModelError(f"the checkpoint lacks {ways[0][0].source!r}; it is incomplete or belongs to another config")


def untied(source: LayerSource) -> LayerSource:
    """The same model with a head of its own, for now equal to the embedding: so that it can be rounded alone."""
    if not source.spec.tie_embeddings:
        return source
    ((embedding, _),) = source.parts("embed")
    return LayerSource(replace(source.spec, tie_embeddings=False), _WithHead(source.checkpoint, embedding))


class _WithHead:
    """A checkpoint that has its embedding a second time."""

    def __init__(self, inner: Checkpoint, embedding: str) -> None:
        self.config: dict[str, Any] = inner.config
        self._inner, self._embedding = inner, embedding

    def names(self) -> list[str]:
        return [*self._inner.names(), HEAD]

    def tensor(self, name: str) -> torch.Tensor:
        return self._inner.tensor(self._embedding if name == HEAD else name)
