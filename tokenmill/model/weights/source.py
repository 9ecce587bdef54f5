"""Finds the files of a model by its name: the default one, a local path, or a name on the model hub."""

from __future__ import annotations

import contextlib
import difflib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenmill.cache import Chosen, hub_dir, models_dir
from tokenmill.errors import ModelError
from tokenmill.model.weights import default_model, hub

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all (0: unknown), what is going on

_DEFAULT_NAMES = ("default", default_model.NAME)
_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[\w./-]+\.gguf))?")
_FIRST_PART = re.compile(r".*-00001-of-\d{5}\.gguf")


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies on this machine: one .gguf file, or a directory with config.json beside the weights."""

    kind: Literal["gguf", "directory"]
    path: Path
    name: str


@dataclass(frozen=True)
class CachedModel:
    """A downloaded model."""

    name: str
    path: Path
    size: int  # bytes on disk


def resolve(model: str | Path | None = None, progress: Progress | None = None, cache_dir: Chosen = None) -> ModelFiles:
    """The files of `model`, downloaded first if they are not here yet. Where to: tokenmill/cache.py."""
    progress = _unfailing(progress) if progress is not None else _ignore
    name = "default" if model is None else str(model)
    if name.lower() in _DEFAULT_NAMES:
        path = default_model.ensure(models_dir(cache_dir), progress)
        return ModelFiles("gguf", path, default_model.NAME)
    local = Path(name).expanduser()
    if name and local.exists():
        return _local(local)
    match = _HUB_NAME.fullmatch(name)
    if match is None or name.startswith((".", "~")):
        close = difflib.get_close_matches(name.lower(), _DEFAULT_NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else 'check the path, or use the model "default"'
        raise ModelError(
            f"model {name!r} is neither a file nor a directory here, nor a hub name such as org/name; {hint}"
        )
    return _from_hub(match["repo"], match["file"], progress, hub_dir(cache_dir))


def list_cached(cache_dir: Chosen = None) -> list[CachedModel]:
    """The models that were downloaded to this machine."""
    found = []
    default = default_model.location(models_dir(cache_dir))
    if default.is_file():
        found.append(CachedModel(default_model.NAME, default, default.stat().st_size))
    found += [CachedModel(*entry) for entry in hub.list_cached(hub_dir(cache_dir))]
    return found


def remove(name: str, cache_dir: Chosen = None) -> None:
    """Deletes a downloaded model."""
    if name.lower() in _DEFAULT_NAMES:
        folder = default_model.location(models_dir(cache_dir)).parent
        if folder.is_dir():
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise ModelError(f"{folder} cannot be removed ({error.strerror or error})") from None
            return
    elif hub.remove(name, hub_dir(cache_dir)):
        return
    raise ModelError(f"model {name!r} is not in the cache; `tokenmill models` lists those that are")


def _local(path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; give a .gguf file or the directory that holds config.json")
        return ModelFiles("gguf", path, path.stem)
    if (path / "config.json").is_file():
        return ModelFiles("directory", path, path.resolve().name)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1 and all(re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name) for file in files):
        files = [file for file in files if _FIRST_PART.fullmatch(file.name)]
    if len(files) != 1:
        what = f"{len(files)} .gguf models" if files else "neither config.json nor a .gguf file"
        raise ModelError(f"{path} holds {what}; give the .gguf file itself or a directory with one model")
    return ModelFiles("gguf", files[0], files[0].stem)


def _from_hub(repo: str, file: str | None, progress: Progress, cache_dir: Path) -> ModelFiles:
    if file is not None:
        return ModelFiles("gguf", hub.download_file(repo, file, progress, cache_dir), f"{repo}:{file}")
    folder = hub.download_model(repo, progress, cache_dir)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{repo} has no config.json with safetensors weights; if it holds GGUF files, name one as {repo}:FILE.gguf"
        )
    return ModelFiles("directory", folder, repo)


def _unfailing(progress: Progress) -> Progress:
    """Who shows progress may fail (a terminal that is gone, say); the download does not."""

    def tell(done: int, total: int, what: str) -> None:
        with contextlib.suppress(Exception):
            progress(done, total, what)

    return tell


def _ignore(done: int, total: int, what: str) -> None:
    """Progress that nobody asked for."""
