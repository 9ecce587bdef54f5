"""What keys and values were computed with, in a few bytes: blocks of another model must never be taken for ours."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenmill.model.weights.source import ModelFiles

PAGE, PAGES = 4096, 256  # of a file are read
SUFFIXES = (".gguf", ".safetensors", ".json")


def model_identity(files: ModelFiles, *settings: object) -> str:
    """Files by name, size, time and some hundred pages of what is in them; settings: whatever else decides."""
    digest = hashlib.blake2b(digest_size=16)
    found = [files.path] if files.kind == "gguf" else sorted(Path(files.path).iterdir())
    for path in found:
        if path.suffix in SUFFIXES and path.is_file():
            _add(digest, path)
    digest.update(repr(settings).encode())
    return digest.hexdigest()


def weights_fingerprint(files: ModelFiles) -> str:
    """The same for copies of a model on several machines, whatever they are called there and however old they are."""
    digest = hashlib.blake2b(digest_size=16)
    folder = [Path(files.path) / "config.json", *sorted(Path(files.path).glob("*.safetensors"))]
    for path in [files.path] if files.kind == "gguf" else folder:
        digest.update(f"{path.stat().st_size}\0".encode())
        _add_pages(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, path: Path) -> None:
    status = path.stat()
    digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    _add_pages(digest, path)


def _add_pages(digest: hashlib.blake2b, path: Path) -> None:
    status = path.stat()
    with path.open("rb") as file:
        if status.st_size <= PAGES * PAGE:
            digest.update(file.read())
            return
        for number in range(PAGES):
            file.seek((status.st_size - PAGE) * number // (PAGES - 1))
            digest.update(file.read(PAGE))
