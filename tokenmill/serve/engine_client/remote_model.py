"""Reads the tokenizer of a model whose engine is in another process."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.config import EngineConfig
from tokenmill.model.tokenizer import Tokenizer

Progress = Callable[[int, int, str], None]  # done, in all, what


def load_tokenizer(config: EngineConfig, progress: Progress | None) -> Tokenizer:
    """Reads it from the model's files, which are downloaded first if need be: the engine will find them here."""
    from tokenmill.model.weights.source import resolve

    files = resolve(config.model, progress=progress, cache_dir=config.cache_dir)
    if files.kind == "directory":
        tokenizer = Tokenizer.from_directory(files.path)
    else:
        from tokenmill.engine import checkpoints

        tokenizer = checkpoints.load_tokenizer(files, None)
    tokenizer.bound  # noqa: B018 (worked out now, and not while a request waits)
    return tokenizer
