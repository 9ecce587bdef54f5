"""Keeps which kernels an engine needs, so that its next start with the same settings need not find out again.

A list is JSON of plain values and of the few classes that describe arguments; nothing else can be named in it. It says
which compiled form serves which launch, so it is taken from files of this user only, like Triton's compiled kernels
beside it. A kernel that a list lacks is compiled when it is first launched.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmill.cache import write_whole
from tokenmill.ops.triton.specializations import Collected, DescriptorLike

DESCRIBING = ("tokenmill.ops.triton.specializations.", "triton.")  # where classes of described arguments come from


def list_path(folder: Path, context: str) -> Path:
    """Where the list for `context` is kept: versions, the device, the model's shape and the engine's settings.

    The state of the package's own files is part of its name: which kernels a step launches is written there.
    """
    digest = hashlib.sha256(context.encode())
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        found = path.stat()
        digest.update(f"{path.relative_to(root)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return folder / f"{digest.hexdigest()[:40]}.json"


def write_list(path: Path, collected: Collected) -> None:
    """Best effort: whoever cannot write it finds out again at the next start."""
    with contextlib.suppress(OSError, TypeError):
        # A key begins with the number of the device, which may be another one next time.
        listed = [(_encode(one), [_encode(key[1:]) for _, key in holders]) for one, holders in collected.found.items()]
        write_whole(path, json.dumps(listed))


def read_list(path: Path, device: int) -> Collected | None:
    """For the GPU of that number. None: there is none, or it is not one that this version wrote."""
    collected = Collected()
    try:
        if hasattr(os, "getuid") and path.stat().st_uid not in (os.getuid(), 0):
            return None
        for described, keys in json.loads(path.read_text()):
            one = _decode(described)
            named = [one.module, *(arg.module for arg in one.args if isinstance(arg, DescriptorLike))]
            if not all(name.startswith(("tokenmill.", "triton.")) for name in named):
                return None
            kernel = getattr(importlib.import_module(one.module), one.kernel)
            if not hasattr(kernel, "take"):  # a QuickKernel
                return None
            collected.found[one] = [(kernel, (device, *_decode(key))) for key in keys]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RecursionError):
        return None
    return collected


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_encode(one) for one in value]
    if isinstance(value, list):
        return {"list": [_encode(one) for one in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, type):
        return {"type": f"{value.__module__}.{value.__qualname__}"}
    if is_dataclass(value):
        kind = type(value)
        members = {one.name: _encode(getattr(value, one.name)) for one in fields(value)}
        return {"class": f"{kind.__module__}.{kind.__qualname__}", "fields": members}
    raise TypeError(f"{value!r} has no place in a list of kernels")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(one) for one in value)
    if not isinstance(value, dict):
        return value
    if "list" in value:
        return [_decode(one) for one in value["list"]]
    if "dtype" in value:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']!r} is no dtype")
        return dtype
    if "type" in value:
        return _TYPES[value["type"]] if value["type"] in _TYPES else _described_class(value["type"])
    return _described_class(value["class"])(**{name: _decode(one) for name, one in value["fields"].items()})


_TYPES: dict[str, type] = {
    f"{one.__module__}.{one.__qualname__}": one
    for one in (int, float, bool, type(None), torch.Tensor, torch.nn.Parameter)
}


def _described_class(name: str) -> type:
    """A class that describes an argument: nothing else may be named in a file."""
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind) if name.startswith(DESCRIBING) else None
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(f"{name!r} has no place in a list of kernels")
    return found
