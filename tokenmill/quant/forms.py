"""Which form each linear layer's weight gets: parses the setting `quantization`, a name or names per layer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tokenmill.errors import ConfigError

KINDS = ("int8", "int4", "w8a8", "fp8", "bf16", "fp16", "fp32")
FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # layers that stay floats, in a dtype of their own
GROUPS = (32, 64, 128)
STORED = ("awq", "gptq", "compressed-tensors", "gguf")  # formats of checkpoints, which say themselves what they are
_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?(?:\.(\w+))?")


@dataclass(frozen=True)
class WeightForm:
    """How a weight is stored and multiplied."""

    kind: str  # one of KINDS
    group: int | None = None  # columns that share a scale; int4 without: what suits the device
    zeros: bool = False  # int4: codes count from the group's smallest weight, not from zero

    @property
    def name(self) -> str:
        return self.kind + (f"-g{self.group}" if self.group else "") + ("-zeros" if self.zeros else "")


@dataclass(frozen=True)
class Layout:
    """The form of every linear layer, by canonical name: `layers.3.gate_up`, `lm_head`; and of a layer's experts."""

    default: WeightForm | None = None  # None: as the model computes, or as its file stores it
    overrides: tuple[tuple[str, WeightForm], ...] = ()  # patterns; the last that fits counts

    def of(self, name: str) -> WeightForm | None:
        for pattern, form in reversed(self.overrides):
            if _fits(pattern, name):
                return form
        # Errors in the head reach the logits undamped, and often it is the embedding, too.
        return None if name == "lm_head" else self.default

    @property
    def kinds(self) -> set[str]:
        """Of all forms that it names."""
        return {form.kind for form in (self.default, *(form for _, form in self.overrides)) if form is not None}

    @property
    def name(self) -> str:
        parts = [self.default.name] if self.default else []
        return ", ".join([*parts, *(f"{pattern}={form.name}" for pattern, form in self.overrides)])


def parse_layout(wanted: str | Mapping[str, str] | None) -> Layout:
    """From "int4", "int4-g64-zeros,lm_head=int8,layers.0-3=bf16", or {"default": "int4", "lm_head": "int8"}."""
    if wanted is None:
        return Layout()
    if isinstance(wanted, str):
        parts = [part.strip().rpartition("=") for part in wanted.split(",")]
        named = [(pattern.strip() or "default", form.strip()) for pattern, _, form in parts]
    elif isinstance(wanted, Mapping):
        named = list(wanted.items())
    else:
        raise ConfigError(f"quantization is {wanted!r}; it must be a name such as 'int4', or names per layer")
    default, overrides = None, []
    for pattern, text in named:
        form = parse_form(text)
        if pattern == "default":
            if default is not None:
                raise ConfigError(f"quantization is {wanted!r}, which names {default.name} and {text} for all layers")
            default = form
        elif pattern == "lm_head" or (isinstance(pattern, str) and _LAYERS.fullmatch(pattern)):
            overrides.append((pattern, form))
        else:
            raise ConfigError(
                f"quantization names {pattern!r}; a layer is named 'lm_head', 'layers.3', 'layers.0-3' or "
                "'layers.0-3.down' (one of qkv, o, gate_up, down, experts_gate_up, experts_down)"
            )
    return Layout(default, tuple(overrides))


def check_names(layout: Layout, names: Collection[str]) -> None:
    """Refuse a layout that names layers which are not among the linear ones of the model."""
    count = 1 + max((int(name.split(".")[1]) for name in names if name.startswith("layers.")), default=-1)
    for pattern, form in layout.overrides:
        found = _LAYERS.fullmatch(pattern)
        first, last = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
        if pattern == "lm_head" and pattern not in names:
            why = "this model's head is its embedding; leave it out"
        elif last >= count and found is not None:
            why = f"this model has {count} layers, 0 to {count - 1}; name no others"
        elif first > last:
            why = f"{first} is after {last}; write the smaller number first"
        elif not any(_fits(pattern, name) for name in names):
            why = "this model has no such matrix in these layers; leave it out"
        else:
            continue
        raise ConfigError(f"quantization names {pattern!r} (as {form.name}), but {why}")


def parse_form(text: object) -> WeightForm:
    if not isinstance(text, str):
        raise ConfigError(f"quantization is {text!r}; it must be a name such as 'int4'")
    kind, *options = text.split("-")
    if kind not in KINDS:
        raise ConfigError(f"quantization={text!r} is not available; there are {', '.join(KINDS)}, and int4-g32-zeros")
    group, zeros = None, False
    for option in options:
        if kind == "int4" and group is None and option in {f"g{size}" for size in GROUPS}:
            group = int(option[1:])
        elif kind == "int4" and option == "zeros":
            zeros = True
        else:
            raise ConfigError(f"quantization={text!r} is not known; int4 may be followed by -g32, -g64, -g128, -zeros")
    return WeightForm(kind, group, zeros)


def _fits(pattern: str, name: str) -> bool:
    found = _LAYERS.fullmatch(pattern)
    if found is None:
        return pattern == name
    at, _, rest = name.removeprefix("layers.").partition(".")
    if not name.startswith("layers.") or not at.isdigit():
        return False
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    return first <= int(at) <= last and found[3] in (None, rest)
