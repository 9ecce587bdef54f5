"""What the front knows of an engine in another process: the facts it told, and the tokenizer, read here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.config import EngineConfig
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.remote_engine import RemoteEngine

Progress = Callable[[int, int, str], None]  # done, in all, what


@dataclass(frozen=True)
class RemoteModel:
    """What Front wants to know, from what the engine said."""

    engine: RemoteEngine
    tokenizer: Tokenizer | None
    spec: wire.EngineReady  # for its vocabulary
    settings: wire.EngineReady  # for its max_len


def load_tokenizer(config: EngineConfig, progress: Progress | None) -> Tokenizer:
    """Reads it from the model's files, which are downloaded first if need be: the engine will find them here."""
    from tokenmill.model.weights.source import resolve

    files = resolve(config.model, progress=progress, cache_dir=config.cache_dir)
    if files.kind == "directory":
        tokenizer = Tokenizer.from_directory(files.path)
    else:
        from tokenmill.engine import build

        tokenizer = build.load_tokenizer(files, None)
    tokenizer.bound  # noqa: B018 (worked out now, and not while a request waits)
    return tokenizer
