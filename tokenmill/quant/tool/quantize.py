"""Quantizes a model layer by layer: chooses each matrix's form, prepares the layer, and rounds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from tokenmill.errors import ConfigError
from tokenmill.model.spec import DecoderSpec
from tokenmill.quant.forms import FLOATS, GROUPS, Layout, WeightForm, check_names
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import GRIDS, INPUTS, group_blocks, group_of, round_to_nearest
from tokenmill.quant.tool.awq import best_scale
from tokenmill.quant.tool.calibrate import LayerCalibration, Moments
from tokenmill.quant.tool.gptq import gptq
from tokenmill.quant.tool.joints import Params, joints
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.smooth import ALPHA, smoothing_scale

METHODS = ("rtn", "gptq", "awq", "smoothquant")
ROUNDED = ("linear", "experts")  # kinds of parameters


@dataclass(frozen=True)
class Method:
    """How matrices are rounded."""

    name: str = "rtn"  # one of METHODS
    clip: bool = True  # scales are searched for the least error; False: the largest weight sets them
    act_order: bool = True  # gptq
    alpha: float = ALPHA  # smoothquant
    static_inputs: bool = False  # 8-bit inputs: one scale for all, from the text; False: one for each token
    scale_dtype: torch.dtype = torch.float32

    @property
    def needs_text(self) -> bool:
        return self.name != "rtn" or self.static_inputs


@dataclass(frozen=True)
class Quantized:
    """A layer (or the head, under its own name) after quantization."""

    prefix: str  # of canonical names: "layers.3.", or "" for the head
    params: Params  # with scales folded in
    groups: dict[str, Groups] = field(default_factory=dict)  # those that were rounded


def plan_forms(spec: DecoderSpec, layout: Layout) -> tuple[dict[str, WeightForm], list[str]]:
    """The form of every matrix that gets one, by canonical name (of a layer's experts one for all); and what had to
    differ from the wish.
    """
    found: dict[str, WeightForm] = {}
    changed: dict[tuple[str, str, int], int] = {}
    parameters = spec.parameters()
    check_names(layout, [name for name, param in parameters.items() if param.kind in ROUNDED])
    for name, param in parameters.items():
        form = layout.of(name) if param.kind in ROUNDED else None
        if form is None:
            continue
        if form.kind == "int4":
            columns = param.shape[-1]
            fits = [size for size in reversed(GROUPS) if columns % size == 0 and size <= (form.group or max(GROUPS))]
            if not fits:
                raise ConfigError(f"{name} has {columns} columns, no multiple of {min(GROUPS)}: give it {name}=int8")
            if fits[0] != (most := form.group or max(GROUPS)):
                key = (replace(form, group=most).name, replace(form, group=fits[0]).name, columns)
                changed[key] = changed.get(key, 0) + 1
            form = replace(form, group=fits[0])
        found[name] = form
    if not found:
        raise ConfigError(f"{layout.name} names no layer of this model, so there is nothing to do")
    notes = [
        f"{count} matrices of {columns} columns become {now}: that is no multiple of the group of {wanted}"
        for (wanted, now, columns), count in changed.items()
    ]
    if spec.moe is not None and any(parameters[name].kind == "experts" for name in found):
        notes.append("experts are rounded to nearest, whatever the method: no text is routed through each of them")
    return found, notes


def quantize_model(
    source: LayerSource,
    forms: dict[str, WeightForm],
    method: Method,
    ids: torch.Tensor | None,  # [samples, length]: the calibration text
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,  # layers done, in all
) -> Iterator[Quantized]:
    """Every layer in order, each calibrated with what the quantized layers before it compute."""
    if method.needs_text and ids is None:
        raise ConfigError(f"{method.name} measures what layers are given: name a text with --calibrate")
    spec = source.spec
    calibration = LayerCalibration(source, ids, device) if method.needs_text and ids is not None else None
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        wanted = {name.removeprefix(prefix): form for name, form in forms.items() if name.startswith(prefix)}
        params = {name: one.to(device) for name, one in source.layer(index).items()}
        groups: dict[str, Groups] = {}
        if wanted and calibration is None:
            groups = {name: round_one(params[name], form, method, None) for name, form in _rounded(wanted)}
        elif wanted and calibration is not None:
            known = calibration.moments(index, params)
            _prepare(spec, params, wanted, method, known)
            groups = {name: round_one(params[name], form, method, known.get(name)) for name, form in _rounded(wanted)}
        params |= {name: _narrowed(params[name], form) for name, form in wanted.items()}
        if calibration is not None and index + 1 < spec.num_layers + ("lm_head" in forms):
            calibration.advance(index, params, groups)
        yield _on_host(Quantized(prefix, params, groups))
        if progress is not None:
            progress(index + 1, spec.num_layers)
    if "lm_head" in forms:
        head = source.read("lm_head").to(device)
        moments = None if calibration is None else calibration.head_moments(source.read("final_norm"))
        own = _rounded({"lm_head": forms["lm_head"]})
        groups = {name: round_one(head, form, method, moments) for name, form in own}
        yield _on_host(Quantized("", {"lm_head": _narrowed(head, forms["lm_head"])}, groups))


def round_one(weight: torch.Tensor, form: WeightForm, method: Method, moments: Moments | None) -> Groups:
    """Of a layer's experts, the rows of all, one expert after the other."""
    weight = weight.flatten(0, -2)
    if method.name == "gptq" and moments is not None:
        found = gptq(weight, moments.gram, form, act_order=method.act_order, scale_dtype=method.scale_dtype)
    else:
        importance = None
        if moments is not None and method.clip:
            group = group_of(form, weight.shape[1])
            whole = group == weight.shape[1]
            importance = moments.gram.diagonal() if whole else group_blocks(moments.gram, group)
        found = round_to_nearest(weight, form, method.clip, importance=importance, scale_dtype=method.scale_dtype)
    if method.static_inputs and moments is not None and form.kind in INPUTS:
        top = moments.largest.max().clamp(min=1e-8)
        return replace(found, input_scale=(top / GRIDS[form.kind].high).to(method.scale_dtype).float())
    return found


def _prepare(
    spec: DecoderSpec, params: Params, wanted: dict[str, WeightForm], method: Method, moments: dict[str, Moments]
) -> None:
    """Folds scales into the layer before it is rounded; the moments become those of the inputs as they are then."""
    if method.name not in ("awq", "smoothquant"):
        return
    for joint in joints(spec, params, norms_only=method.name == "smoothquant"):
        form = wanted.get(joint.reader)
        if form is None or form.kind in FLOATS:
            continue
        known, weight = moments[joint.reader], params[joint.reader]
        if method.name == "awq":
            scale = best_scale(weight, known, form, joint)
        else:
            scale = smoothing_scale(weight, joint.shared(known.largest), method.alpha)
        joint.fold(params, scale)
        moments[joint.reader] = known.divided(scale)


def _on_host(layer: Quantized) -> Quantized:
    groups = {
        name: replace(
            one,
            codes=one.codes.cpu(),
            scale=one.scale.cpu(),
            zeros=None if one.zeros is None else one.zeros.cpu(),
            input_scale=None if one.input_scale is None else one.input_scale.cpu(),
        )
        for name, one in layer.groups.items()
    }
    return Quantized(layer.prefix, {name: one.cpu() for name, one in layer.params.items()}, groups)


def _narrowed(weight: torch.Tensor, form: WeightForm) -> torch.Tensor:
    """What stays floats, as floats of its form's type hold it."""
    return weight.to(getattr(torch, FLOATS[form.kind])).to(weight.dtype) if form.kind in FLOATS else weight


def _rounded(wanted: dict[str, WeightForm]) -> list[tuple[str, WeightForm]]:
    return [(name, form) for name, form in wanted.items() if form.kind not in FLOATS]
