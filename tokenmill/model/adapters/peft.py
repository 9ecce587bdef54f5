"""Reads an adapter as PEFT saves it, and checks every tensor against the base before any is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import InvalidRequest
from tokenmill.model.adapters.config import AdapterConfig, read_config
from tokenmill.model.adapters.files import CONFIG, WEIGHTS
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.names import Change, recipes, spelled_as_in_transformers

_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")
_READ_AT_ONCE = 1 << 20
_WHY_NOT = {  # by the kind of a parameter
    "experts": "is one of its experts; those are not adapted, so train it for attention and shared experts alone",
    "router": "chooses its experts, which is not adapted; leave it out",
    "stacked": "is not applied as it is, but taken into queries and answers head by head; leave it out",
    "linear": "is the head, which is not adapted; leave it out",
}


@dataclass(frozen=True)
class Section:
    """Rows of a linear layer's weight that are a module of their own in checkpoints."""

    linear: str  # its canonical name
    number: int  # among the linear layer's sections
    first: int
    last: int
    change: Change | None = None  # of the order of its rows, where that is another in checkpoints


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to a section: up.T @ down."""

    section: Section
    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [rank, rows], scaled


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter in host memory, in the type that slots have."""

    key: str  # a digest of its files
    rank: int  # the largest
    factors: tuple[Factors, ...]

    @property
    def nbytes(self) -> int:
        return sum(one.down.nbytes + one.up.nbytes for one in self.factors)

    def pinned(self) -> AdapterWeights:
        """In memory that a GPU copies from without anybody waiting."""
        moved = (Factors(one.section, one.down.pin_memory(), one.up.pin_memory()) for one in self.factors)
        return AdapterWeights(self.key, self.rank, tuple(moved))


class Base:
    """What adapters may change of a model: its linear layers, by the names that checkpoints give their parts."""

    def __init__(self, spec: DecoderSpec, name: str, max_rank: int, dtype: torch.dtype) -> None:
        """spec: of the model, or of a part of all its layers; dtype: that factors are kept in."""
        spec = spec.whole
        self.name, self.max_rank, self.dtype = name, max_rank, dtype
        self.sections: dict[str, tuple[Section, ...]] = {}  # of every linear layer
        self.columns: dict[str, int] = {}
        self.modules: dict[str, tuple[Section, ...]] = {}  # by name in checkpoints; a fused one has several
        self.why_not: dict[str, str] = {}  # of other modules
        parameters = spec.parameters()
        for linear, ways in recipes(spec).items():
            if parameters[linear].kind != "linear" or linear == "lm_head":
                why = _WHY_NOT.get(parameters[linear].kind)
                named = (piece.source.removesuffix(".weight") for way in ways for piece in way)
                self.why_not |= {} if why is None else dict.fromkeys(named, why)
                continue
            pieces = ways[0]
            ends = [piece.first + piece.shape[0] for piece in pieces]
            spans = enumerate(zip(pieces, ends, strict=True))
            mine = [Section(linear, n, one.first, end, one.change) for n, (one, end) in spans]
            self.sections[linear], self.columns[linear] = tuple(mine), pieces[0].shape[1]
            for way in ways:
                for piece in way:
                    last = piece.first + piece.shape[0]
                    covered = tuple(one for one in mine if piece.first <= one.first and one.last <= last)
                    self.modules.setdefault(piece.source.removesuffix(".weight"), covered)


def adapter_key(folder: Path) -> str:
    """Of what the files say, so that the same name with other weights is another adapter. Raises InvalidRequest."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                while part := file.read(_READ_AT_ONCE):
                    digest.update(part)
        except OSError as error:
            raise InvalidRequest(
                f"there is no adapter to read at {str(folder / name)!r} ({error.strerror}); give a folder with "
                f"{CONFIG} and {WEIGHTS}"
            ) from None
        digest.update(b"\0")
    return digest.hexdigest()


def read_adapter(folder: Path, base: Base) -> AdapterWeights:
    """Raises InvalidRequest in one sentence for whatever cannot be served."""
    config, key = read_config(folder / CONFIG), adapter_key(folder)
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            pairs = _pairs(file.keys(), path, base, config)
            _check_complete(pairs, path, base, config)
            factors: list[Factors] = []
            for module, names in pairs.items():
                factors += _read(file, module, names, path, base, config)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InvalidRequest(f"{str(path)!r} is truncated or corrupt ({error!s:.200}); save it again") from None
    return AdapterWeights(key, max(one.down.shape[0] for one in factors), tuple(factors))


def _pairs(names: Iterable[str], path: Path, base: Base, config: AdapterConfig) -> dict[str, dict[str, str]]:
    """Module -> side -> name of its tensor."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        side = next((one for one in _SIDES if name.endswith(one)), None)
        module = name.removeprefix(_PREFIX).removesuffix(side or "")
        (spelled,) = spelled_as_in_transformers([module + ".weight"])
        module = spelled.removesuffix(".weight")
        if side is not None and module in base.why_not:
            raise InvalidRequest(f"{str(path)!r} adapts {module!r:.200}, which in {base.name} {base.why_not[module]}")
        if side is None or module not in base.modules:
            raise InvalidRequest(
                f"{str(path)!r} has {name!r:.200}, which {base.name} has no linear layer for (it was made for "
                f"{config.base!r}; q, k, v, o, gate, up and down of its layers may be adapted)"
            )
        found.setdefault(module, {})[side] = name
    if not found:
        raise InvalidRequest(f"{str(path)!r} holds no tensors; save the adapter again")
    return found


def _check_complete(pairs: Mapping[str, Mapping[str, str]], path: Path, base: Base, config: AdapterConfig) -> None:
    for module, names in pairs.items():
        missing = [side for side in _SIDES if side not in names]
        if missing:
            raise InvalidRequest(f"{str(path)!r} lacks {module + missing[0]!r}; save the adapter again")
    for target in config.targets if config.every_layer else ():
        wanted = [one for one in base.modules if one == target or one.endswith("." + target)]
        fused = [one for one in wanted if one not in pairs]
        lacking = [one for one in fused if not any(one in pairs for one in wanted) or _is_plain(base, one, pairs)]
        if not wanted or lacking:
            raise InvalidRequest(
                f"{str(path)!r} lacks {(lacking or [target])[0]!r:.100}, one of its target_modules; the base is "
                f"{base.name}, and it was made for {config.base!r}"
            )


def _is_plain(base: Base, module: str, pairs: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether no other module that is there stands for the same rows."""
    mine = set(base.modules[module])
    return not any(mine & set(base.modules[other]) for other in pairs)


def _read(
    file: Any, module: str, names: Mapping[str, str], path: Path, base: Base, config: AdapterConfig
) -> list[Factors]:
    sections, rank = base.modules[module], config.rank_of(module)
    rows, columns = sections[-1].last - sections[0].first, base.columns[sections[0].linear]
    if rank > base.max_rank:
        raise InvalidRequest(
            f"{str(path)!r} has rank {rank} at {module!r}, but there is room for {base.max_rank}; raise max_lora_rank"
        )
    sides = []
    for side, wanted in zip(_SIDES, ([rank, columns], [rows, rank]), strict=True):
        shape = list(file.get_slice(names[side]).get_shape())
        if shape != wanted:
            raise InvalidRequest(
                f"{str(path)!r} has {shape} at {names[side]!r}, but {base.name} with rank {rank} needs {wanted} there; "
                f"it was made for {config.base!r}"
            )
        sides.append(file.get_tensor(names[side]).float())
    down, up = sides[0].to(base.dtype).contiguous(), (sides[1] * config.scale_of(module)).to(base.dtype)
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        dtype = str(base.dtype).removeprefix("torch.")
        raise InvalidRequest(f"{str(path)!r} has what is no number in {dtype} at {module!r}; train or save it again")
    first = sections[0].first
    found = []
    for one in sections:
        rows_of_it = up[one.first - first : one.last - first]
        rows_of_it = rows_of_it if one.change is None else one.change(rows_of_it)
        found.append(Factors(one, down, rows_of_it.T.contiguous()))
    return found
