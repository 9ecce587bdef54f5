"""What a stage's layers are stored as, chosen for the whole model, and what the fullest stage takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from tokenmill.model.spec import DecoderSpec
from tokenmill.plan.solve.memory import ModelBytes
from tokenmill.quant.schemes.scheme import Schemes


def schemes_of_part(schemes: Schemes, part: DecoderSpec) -> Schemes:
    """A stage's layers are numbered anew: what was chosen for the model's, under the names that they have there."""
    if part.stage is None:
        return schemes
    names = {name: part.stage.name_in_model(name) for name in part.parameters()}
    return replace(
        schemes,
        named={name: schemes.named[model] for name, model in names.items() if model in schemes.named},
        as_stored=frozenset(name for name, model in names.items() if model in schemes.as_stored),
    )


def fullest(sizes: Sequence[ModelBytes]) -> ModelBytes:
    """What is enough for any of them: all ranks have as many blocks."""
    most = {field.name: max(getattr(one, field.name) for one in sizes) for field in fields(ModelBytes)}
    return replace(sizes[0], **most)
