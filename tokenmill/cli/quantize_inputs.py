"""What `tokenmill quantize` works on: a model, opened for reading layer by layer, pieces of a text, and questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.cli.terminal import note, progress
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from tokenmill.model.tokenizer import Tokenizer
    from tokenmill.model.weights.checkpoint import Checkpoint
    from tokenmill.model.weights.source import ModelFiles
    from tokenmill.quant.tool.layer_source import LayerSource


@dataclass(frozen=True)
class OpenedModel:
    files: ModelFiles
    checkpoint: Checkpoint
    source: LayerSource
    tokenizer: Tokenizer


def open_model(model: str) -> OpenedModel:
    from tokenmill.config import EngineConfig
    from tokenmill.engine.checkpoints import load_tokenizer, open_checkpoint
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.source import resolve
    from tokenmill.quant.tool.layer_source import LayerSource

    with progress() as tell:
        files = resolve(model, progress=tell)
    checkpoint, config = open_checkpoint(EngineConfig(model=model), files)
    assert checkpoint is not None  # only dummy weights have none
    source = LayerSource(spec_from_config(config), checkpoint)
    return OpenedModel(files, checkpoint, source, load_tokenizer(files, checkpoint))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def token_ids(tokenizer: Tokenizer, path: Path) -> torch.Tensor:  # [tokens]
    import torch

    return torch.tensor(tokenizer.encode(read_text(path), add_special_tokens=False), dtype=torch.long)


def gsm8k_questions(path: Path, count: int) -> list[dict[str, str]]:
    """The first questions of a file, each with an answer that ends in a number."""
    from tokenmill.quant.tool.questions import last_number

    found: list[dict[str, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except ValueError:
            raise ConfigError(f"{path}, line {number}: this is not JSON; GSM8K has a question in every line") from None
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("question", "answer")):
            raise ConfigError(f"{path}, line {number}: GSM8K has a question and an answer there, and both are texts")
        if last_number(one["answer"]) is None:
            raise ConfigError(f"{path}, line {number}: there is no number in the answer, so nobody can be right")
        found.append(one)
        if len(found) == count:
            break
    if not found:
        raise ConfigError(f"{path} has no questions; name a file with one in every line")
    return found


def first_pieces(ids: torch.Tensor, count: int, length: int, path: Path) -> torch.Tensor:  # [count, length]
    """The beginning of a text, cut."""
    return _cut(ids, min(count, len(ids) // length), length, length, path, count)


def spread_pieces(ids: torch.Tensor, count: int, length: int, path: Path) -> torch.Tensor:  # [count, length]
    """Pieces from all over a text; fewer where it is short."""
    fitting = min(count, len(ids) // length)
    return _cut(ids, fitting, length, len(ids) // max(fitting, 1), path, count)


def _cut(ids: torch.Tensor, count: int, length: int, step: int, path: Path, wanted: int) -> torch.Tensor:
    if count < 1:
        raise ConfigError(f"{path} has {len(ids)} tokens, fewer than one piece of {length}; give a longer text")
    if count * length < 1024:
        why = f"{path} has enough for" if count < wanted else f"of {path} you asked for"
        note(f"({why} {count * length} tokens only: what is measured with so few is doubtful)")
    return ids[: count * step].view(count, step)[:, :length].clone()
