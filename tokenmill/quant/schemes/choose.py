"""Chooses the scheme of each linear layer: from what was asked for, what the checkpoint holds, what the machine can."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.device_facts import FLOAT8, PRODUCTS, gpu_misfit, misfit, usable
from tokenmill.quant.forms import FLOATS, GROUPS, Layout, WeightForm, check_names
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.expert_codes import ExpertCodes
from tokenmill.quant.schemes.packed import BLOCK, Packed, can_hold
from tokenmill.quant.schemes.row_scaled import W8A8, Fp8
from tokenmill.quant.schemes.scheme import QuantScheme, Schemes
from tokenmill.quant.schemes.weight_only import WeightOnly

CPU_GROUP = 32  # int4: on CPUs every block of 32 holds a scale in any case
_EXACT = WeightForm("fp32")
FEW_ROWS = 16  # up to here a GPU's step costs what reading the weights costs


@dataclass(frozen=True)
class ComputeTarget:
    """Where the products are computed."""

    device: torch.device
    dtype: torch.dtype
    native: bool = False  # the native CPU library is there, and products go through it


def choose_schemes(
    layout: Layout,
    shapes: Mapping[str, tuple[int, int]],  # of the linear layers, and of a matrix of each expert
    stored: Mapping[str, WeightForm],  # those that a quantized checkpoint holds, as it does
    blocks: bool,  # the checkpoint is a GGUF file
    place: ComputeTarget,
    experts: Collection[str] = (),  # which of the shapes are those of experts
) -> Schemes:
    """What is not asked for stays as the checkpoint stores it, or as the model computes."""
    check_names(layout, shapes)
    _check_device(layout, place)
    plain: QuantScheme = Packed() if place.native else Dense()
    named: dict[str, QuantScheme] = {}
    as_stored = set()
    made: dict[tuple[WeightForm, bool], QuantScheme] = {}  # equal forms share a scheme
    for name, (_, columns) in shapes.items():
        form, kept = layout.of(name), stored.get(name)
        if kept is not None and form in (None, kept, WeightForm(kept.kind)):  # not rounded again to what it is
            if place.native and not can_hold(kept, columns) and (form is None or kept.kind != "fp8"):
                continue  # floats
            form = kept
            as_stored.add(name)
        elif form is not None:
            form = _complete(form, columns, place)
        if form is None:
            continue
        if form.kind in FLOATS and name in experts and not place.native:
            continue  # multiplied in the dtype of the model
        if form.kind == "fp8" and name in experts and not _has_float8(place.device):
            as_stored.discard(name)
            continue  # floats: grouped products have no other way to read such numbers
        if form.group and columns % form.group:
            raise ConfigError(
                f"quantization: {name} has {columns} columns, which are no multiple of the group of {form.name}; "
                f"leave the group out, or give this layer another form ({name}=int8)"
            )
        of_codes = name in experts and (not place.native or form.kind == "fp8")
        if (form, of_codes) not in made:
            made[form, of_codes] = ExpertCodes(form) if of_codes else _scheme(form, plain, place.device)
        named[name] = made[form, of_codes]
    as_saved = layout == Layout() and not blocks and not stored  # floats, which no scheme here rounds
    exact = layout.default == _EXACT or all(layout.of(name) == _EXACT for name in shapes if name != "lm_head")
    return Schemes(plain, named, frozenset(as_stored), exact or as_saved)


def auto_layout(place: ComputeTarget, *, is_quantized: bool, max_rows: int | None, fits: bool) -> tuple[Layout, str]:
    """What `quantization="auto"` means here, and why. fits: at 8 bits the weights would leave room for the cache."""
    if is_quantized:
        return Layout(), "the checkpoint is quantized, and stays as it is"
    if place.device.type == "cpu":
        if not fits:
            return Layout(WeightForm("int4")), "memory is short"
        if not place.native:
            return Layout(), "without the native library, small weights would be widened for every product"
        return Layout(WeightForm("int8")), "half to a quarter of the bytes for every token, and next to no change"
    if not usable(PRODUCTS, place.device):
        return Layout(), "this GPU has no kernels for it"
    if not fits:
        return Layout(WeightForm("int4")), "memory is short"
    if max_rows is not None and max_rows <= FEW_ROWS:
        why = f"with at most {max_rows} requests at once a step costs what reading weights costs"
        return Layout(WeightForm("int4")), why
    if not usable(FLOAT8, place.device):
        return Layout(WeightForm("int8")), "this GPU multiplies no float8, and few rows read half the bytes"
    return Layout(WeightForm("fp8")), "8-bit products have twice the speed, and read half the bytes"


def describe(schemes: Schemes, names: Iterable[str]) -> str:
    """How many layers have which scheme."""
    counts: dict[str, int] = {}
    for name in names:
        kind = schemes.of(name).name
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(kind if len(counts) == 1 else f"{kind} ({count})" for kind, count in counts.items())


def _complete(form: WeightForm, columns: int, place: ComputeTarget) -> WeightForm | None:
    """With the group that suits the device, and the matrix; None: no group does, so it stays as it is."""
    if place.native and form.kind in ("int8", "w8a8") and columns % BLOCK:
        return None
    if form.kind != "int4" or form.group is not None:
        return form
    most = CPU_GROUP if place.native else max(GROUPS)
    fitting = [size for size in GROUPS if size <= most and columns % size == 0]
    return replace(form, group=max(fitting)) if fitting else None


def _scheme(form: WeightForm, plain: QuantScheme, device: torch.device) -> QuantScheme:
    if isinstance(plain, Packed) and form.kind != "fp8":
        return Packed(form, beside=plain)
    if form.kind in FLOATS:
        return Dense(getattr(torch, FLOATS[form.kind]))
    if form.kind == "w8a8":
        return W8A8()
    if form.kind == "fp8" and form.group is None and _has_float8(device):
        return Fp8()
    # Float8 too, where the GPU does not multiply it, or columns have scales in groups, which its products do not know.
    return WeightOnly(form)


def _has_float8(device: torch.device) -> bool:
    """Whether there are such numbers; of a GPU that is only planned for, it is assumed."""
    return device.type != "cuda" or not torch.cuda.is_available() or not gpu_misfit(FLOAT8, device)


def check_effect(layout: Layout, shapes: Mapping[str, tuple[int, int]], schemes: Schemes) -> None:
    """Refuse a wish that no layer can follow; where only some cannot, the report tells."""
    wanted = [name for name in shapes if layout.of(name)]
    if wanted and not any(name in schemes.named for name in wanted):
        raise ConfigError(
            f"quantization is {layout.name!r}, but no layer can have it here: {wanted[0]} has {shapes[wanted[0]][1]} "
            f"columns, which are no multiple of {min(GROUPS)}; leave it out, or take fp8"
        )


def _check_device(layout: Layout, place: ComputeTarget) -> None:
    if layout == Layout() or place.device.type != "cuda" or usable(PRODUCTS, place.device):
        return
    name = torch.cuda.get_device_name(place.device)
    raise ConfigError(f"quantization is {layout.name!r}, which {misfit(PRODUCTS, place.device)} ({name}); unset it")
