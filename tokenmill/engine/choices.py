"""What an engine computes on and in, the scheme of every linear layer, and bytes for the memory plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.checkpoints import Progress
from tokenmill.errors import ConfigError
from tokenmill.model.spec import DecoderSpec, RankPart
from tokenmill.model.weights.checkpoint import BlockCheckpoint, Checkpoint
from tokenmill.model.weights.dummy import packed_dummies
from tokenmill.model.weights.load import packed_as_stored, stored_forms
from tokenmill.model.weights.quantized import QuantizedCheckpoint
from tokenmill.ops.device_facts import INVARIANT, misfit
from tokenmill.ops.invariant import SLICES, slices_of
from tokenmill.ops.kv_forms import KV_FORMS, form_for
from tokenmill.ops.native.library import Library
from tokenmill.ops.native.library import load as load_native
from tokenmill.plan.solve.hardware import Hardware, cpu_hardware
from tokenmill.plan.solve.memory import ModelBytes, guard_bytes
from tokenmill.quant.forms import KINDS, STORED, Layout, parse_layout
from tokenmill.quant.schemes.choose import ComputeTarget, auto_layout, check_effect, choose_schemes
from tokenmill.quant.schemes.dense import Dense, InvariantDense
from tokenmill.quant.schemes.packed import Packed, PackedSlices
from tokenmill.quant.schemes.scheme import QuantScheme, Schemes

_ROOM = 0.7  # of the free memory: what weights may take where the cache is to have room, too


def choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {wanted!r} but torch sees no GPU; use device='cpu' or a CUDA build of torch")
    return device


def choose_dtype(wanted: str, spec: DecoderSpec, device: torch.device) -> tuple[torch.dtype, str]:
    if wanted != "auto":
        return getattr(torch, wanted), "as set"
    if device.type == "cpu":
        return torch.float32, "the fastest that every CPU computes exactly"
    if spec.dtype in ("bfloat16", "float16"):
        return getattr(torch, spec.dtype), "as the checkpoint was saved"
    return torch.bfloat16, "half the bytes of float32"


def choose_kv_dtype(wanted: str, dtype: torch.dtype, schemes: Schemes, device: torch.device) -> tuple[torch.dtype, str]:
    if wanted == "auto":
        if schemes.default.kv_dtype is not None and not schemes.exact:
            return schemes.default.kv_dtype, "half the bytes to read, and far finer than the packed weights"
        return dtype, "as the model computes"
    if wanted in KV_FORMS:
        return KV_FORMS[wanted].dtype, "as set; codes with scales of their own for every token and head"
    chosen: torch.dtype = getattr(torch, wanted)
    if device.type != "cpu" and chosen != dtype:
        raise ConfigError(
            f"kv_cache_dtype is {wanted!r}, but the model computes in {str(dtype).removeprefix('torch.')}, and a GPU's "
            f"KV cache has to be the same, or one of {', '.join(KV_FORMS)}; leave it out"
        )
    return chosen, "as set"


def check_kv_form(wanted: str, spec: DecoderSpec) -> None:
    """Refuse a quantized cache for a model that cannot have it."""
    if wanted not in KV_FORMS:
        return
    if spec.mla is not None:
        raise ConfigError(
            f"kv_cache_dtype is {wanted!r}, but {spec.architecture} caches a latent that keys and values share, which "
            "is kept in floats; leave it out"
        )
    KV_FORMS[wanted].check(spec.head_dim)


def native_for(config: EngineConfig, dtype: torch.dtype, device: torch.device, tell: Progress) -> Library | str | None:
    """The native library for a model on a CPU, built first where it must be; why not, or None where nobody asked."""
    if device.type != "cpu" or dtype != torch.float32 or config.ops not in (None, "native"):
        return None
    native = load_native(tell, config.cache_dir)
    if isinstance(native, Library):
        native.threads = torch.get_num_threads()
    return native


def schemes_for(
    config: EngineConfig, spec: DecoderSpec, checkpoint: Checkpoint | None, place: ComputeTarget
) -> tuple[Schemes, str]:
    """The scheme of every linear layer, and why."""
    asked = config.quantization
    if isinstance(asked, str) and asked in STORED:
        check_format(asked, checkpoint)
        asked = None
    shapes, blocks = matrix_shapes(spec), isinstance(checkpoint, BlockCheckpoint)
    stored = {} if checkpoint is None else stored_forms(spec, checkpoint)
    as_floats = asked is None and not blocks and not stored
    if config.batch_invariant:
        check_invariant(spec, place, as_floats)
        if as_floats or not place.native:
            check_floats(asked)
            return invariant_schemes(spec, place), "batch_invariant is set"
    layout, why = parse_layout(None if asked == "auto" else asked), "as set"
    if asked == "auto":
        rounded = (param.numel for name, param in spec.parameters().items() if name in shapes)
        saved = sum(rounded) * (place.dtype.itemsize - 1)
        fits = spec.weight_bytes(place.dtype.itemsize) - saved < _ROOM * hardware_of(place.device).free_bytes
        layout, why = auto_layout(place, is_quantized=blocks or bool(stored), max_rows=config.max_num_seqs, fits=fits)
        why = f"quantization is auto: {why}"
    elif layout == Layout():
        why = "as stored" if blocks or stored else "floats as saved" if place.native else "as the model computes"
    schemes = choose_schemes(layout, shapes, stored, blocks, place, shapes.keys() - linear_shapes(spec).keys())
    if asked != "auto":
        check_effect(layout, shapes, schemes)
    varying = [schemes.of(name) for name in shapes if not schemes.of(name).batch_invariant]
    if config.batch_invariant and varying:
        raise ConfigError(
            f"batch_invariant is set and quantization is {asked!r}, but products with {varying[0].name} weights depend "
            "on the batch; leave one of them out, or take int8, int4 or w8a8"
        )
    return schemes, why


def check_format(wanted: str, checkpoint: Checkpoint | None) -> None:
    """Refuse the name of a format that the checkpoint does not have: its weights would silently stay as they are."""
    if checkpoint is None:
        found, is_one = "dummy weights are floats", False
    elif isinstance(checkpoint, BlockCheckpoint):
        found, is_one = "the checkpoint is a GGUF file", wanted == "gguf"
    elif isinstance(checkpoint, QuantizedCheckpoint):
        found, is_one = f"the checkpoint is quantized with {checkpoint.method}", wanted == checkpoint.method
    else:
        found, is_one = "the checkpoint is not quantized", False
    if not is_one:
        raise ConfigError(
            f"quantization={wanted!r} is a format of checkpoints, but {found}; leave it out, or take a form that "
            f"weights are rounded to while they are loaded: {', '.join(KINDS)}"
        )


def linear_shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of every linear layer, by canonical name."""
    found = {}
    for name, param in spec.parameters().items():
        if param.kind == "linear":
            rows, columns = param.shape
            found[name] = rows, columns
    return found


def matrix_shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """The same, and those of one expert's matrices: all that a scheme may store."""
    experts = {name: param.shape[1:] for name, param in spec.parameters().items() if param.kind == "experts"}
    return linear_shapes(spec) | {name: (rows, columns) for name, (rows, columns) in experts.items()}


def check_invariant(spec: DecoderSpec, place: ComputeTarget, as_floats: bool) -> None:
    """Refuse what the batch-invariant mode cannot do yet. as_floats: no weight is quantized."""
    reason, device, dtype = None, place.device, str(place.dtype).removeprefix("torch.")
    if spec.mla is not None and not place.native:
        where = "a GPU" if device.type == "cuda" else f"a CPU in {dtype} or with other ops than the native library's"
        reason = f"on {where} {spec.architecture} projects its latent attention with products that depend on the batch"
    elif spec.moe is not None and not place.native and (spec.moe.groups > 1 or place.dtype == torch.float64):
        reason = f"{spec.architecture} in {dtype} routes with a product that depends on it"
    elif device.type == "cuda" and (why_not := misfit(INVARIANT, device)):
        reason = f"it {why_not} ({torch.cuda.get_device_name(device)})"
    elif device.type == "cuda" and place.dtype == torch.float64:
        reason = "its products are there for bfloat16, float16 and float32, not for float64"
    if reason is None and spec.part is not None:
        reason = _varies_with_ranks(spec, spec.part, place, as_floats)
    if reason is not None:
        raise ConfigError(f"batch_invariant is set, but {reason}; leave it out")


def check_floats(asked: object) -> None:
    """Refuse weights that are to be rounded where no product of such weights is batch-invariant."""
    if asked not in (None, "auto"):
        raise ConfigError(
            f"batch_invariant is set and quantization is {asked!r}, whose products depend on the batch on a GPU, "
            "and on CPUs without the native library or in another dtype than float32; leave one of them out"
        )


def _varies_with_ranks(spec: DecoderSpec, part: RankPart, place: ComputeTarget, as_floats: bool) -> str | None:
    """Why so many ranks cannot give the bits of one."""
    whole, moe = part.whole, part.whole.moe
    sizes = {"columns that attention gives": whole.attention_size, "inner columns": whole.intermediate}
    if moe is not None:
        sizes = {"columns that attention gives": whole.attention_size, "inner columns of experts": moe.intermediate}
        sizes |= {} if all(moe.layers) else {"inner columns": whole.intermediate}
    uneven = [f"{spec.architecture} has {size} {what}" for what, size in sizes.items() if size % SLICES]
    if place.device.type != "cpu":
        return "several ranks have no such products on a GPU yet"
    if SLICES % part.ranks:
        return f"sums are added in {SLICES} slices, which {part.ranks} ranks cannot divide (1, 2 and 4 can)"
    if whole.mla is not None and part.ranks > 1:
        return "latent attention has the same bits on one rank only"
    if part.experts is not None or (moe is not None and moe.shared_intermediate):
        return "ranks that divide whole experts, or have shared ones, add them up in another order"
    if place.native and not as_floats and part.ranks > 1:
        return "ranks that divide the columns of quantized or rounded weights add up in another order than one does"
    return f"{uneven[0]}, which are not divided into {SLICES} slices that ranks could share" if uneven else None


def invariant_schemes(spec: DecoderSpec, place: ComputeTarget) -> Schemes:
    """Of floats. On a CPU products that ranks may divide by columns are computed in slices, also on one rank."""
    ranks, named = 1 if spec.part is None else spec.part.ranks, dict[str, QuantScheme]()
    packed = Packed() if place.native else None
    for name, (_, columns) in linear_shapes(spec).items():
        slices = slices_of(columns, ranks)
        if place.device.type == "cpu" and slices > 1 and name.endswith((".o", "down")):
            named[name] = InvariantDense(slices=slices) if packed is None else PackedSlices(slices, packed)
    if packed is None:
        return Schemes(InvariantDense(), named)
    experts = matrix_shapes(spec).keys() - linear_shapes(spec).keys()  # torch multiplies them in slices, too
    return Schemes(packed, named | dict.fromkeys(experts, InvariantDense()), exact=True)


def model_bytes(
    spec: DecoderSpec,
    dtype: torch.dtype,
    schemes: Schemes | None = None,
    checkpoint: Checkpoint | None = None,
    kv_dtype: torch.dtype | None = None,  # None: as dtype
    guarded: bool = False,  # rows that overflow are computed again in float32
) -> ModelBytes:
    itemsize, schemes = dtype.itemsize, schemes or Schemes(Dense())
    widest = torch.float32 if guarded else dtype  # that products are computed in
    shapes, params = matrix_shapes(spec), spec.parameters()
    weights, matrices = spec.weight_bytes(itemsize), matrix_bytes(spec, dtype, schemes, checkpoint)
    for name, held in matrices.items():
        weights += held - params[name].numel * itemsize
    input_copy = max(schemes.of(name).input_bytes(columns) for name, (_, columns) in shapes.items())
    return ModelBytes(
        weights=weights,
        kv_per_token=spec.kv_bytes_per_token((kv_dtype or dtype).itemsize, form_for(kv_dtype or dtype)),
        activation_per_token=spec.activation_elements * itemsize + input_copy,
        logits_per_row=spec.vocab_size * (itemsize + max(4, itemsize)),
        vocab=spec.vocab_size,
        rope_per_position=4 * sum(rope.dim for rope in set(spec.ropes)),
        flops_per_token=2.0 * spec.active_parameters,
        scratch=max(schemes.of(name).scratch_bytes(*shape, widest) for name, shape in shapes.items()),
        guard=_guard_bytes(spec, schemes) if guarded else 0,
        guard_per_token=spec.activation_elements * (widest.itemsize - itemsize),
        layers=_layer_bytes(spec, itemsize, matrices),
        expert_bytes=_expert_bytes(spec, matrices),
        experts=0 if spec.moe is None else spec.moe.experts,
    )


def _layer_bytes(spec: DecoderSpec, itemsize: int, matrices: Mapping[str, int]) -> tuple[int, ...]:
    found = [0] * spec.num_layers
    for name, param in spec.parameters().items():
        if name.startswith("layers."):
            wide = max(4, itemsize) if spec.stored_wide(param.kind) else itemsize
            found[int(name.split(".")[1])] += matrices.get(name, param.numel * wide)
    return tuple(found)


def _expert_bytes(spec: DecoderSpec, matrices: Mapping[str, int]) -> tuple[int, ...]:
    """Of one expert, of every layer that has some."""
    found: dict[int, int] = {}
    for name, param in spec.parameters().items():
        if param.kind == "experts":
            layer = int(name.split(".")[1])
            found[layer] = found.get(layer, 0) + matrices[name] // param.shape[0]
    return tuple(found[layer] for layer in sorted(found))


def matrix_bytes(
    spec: DecoderSpec, dtype: torch.dtype, schemes: Schemes, checkpoint: Checkpoint | None
) -> dict[str, int]:
    """Bytes of the embedding, of every linear layer and of a layer's experts, by canonical name."""
    as_stored: dict[str, int] = {}
    if schemes.default.as_in_file:
        as_stored = packed_dummies(spec, dtype) if checkpoint is None else packed_as_stored(spec, checkpoint)
    found = {}
    for name, param in spec.parameters().items():
        if param.kind in ("linear", "embedding", "experts"):
            scheme, (*stacked, rows, columns) = schemes.of(name), param.shape
            if scheme.as_in_file:
                found[name] = as_stored[name]
            elif param.kind == "linear" or (param.kind == "experts" and not scheme.floats):
                found[name] = math.prod(stacked) * scheme.nbytes(rows, columns, dtype)
            else:  # no other scheme stores an embedding; experts of floats are the model's
                found[name] = param.numel * dtype.itemsize
    return found


def _guard_bytes(spec: DecoderSpec, schemes: Schemes) -> int:
    """What the guard holds of the weights in float32 (model/widened.py): experts in small numbers stay so."""
    stacked: dict[str, int] = {}  # elements, by layer
    small: dict[str, int] = {}
    for name, param in spec.parameters().items():
        small_numbers = param.kind == "experts" and not schemes.of(name).floats
        if name.startswith("layers.") and param.kind != "linear" and not small_numbers:
            layer, counts = name.split(".")[1], stacked if param.kind in ("stacked", "experts") else small
            counts[layer] = counts.get(layer, 0) + param.numel
    matrices = [param.numel for param in spec.parameters().values() if param.kind in ("linear", "embedding")]
    return guard_bytes(max(matrices), max(stacked.values(), default=0), max(small.values(), default=0))


def hardware_of(device: torch.device, ranks: int = 1) -> Hardware:
    """What each of so many ranks has of it."""
    if device.type == "cpu":
        whole = cpu_hardware()
        return replace(whole, total_bytes=whole.total_bytes // ranks, free_bytes=whole.free_bytes // ranks)
    free, total = torch.cuda.mem_get_info(device)
    return Hardware("cuda", torch.cuda.get_device_name(device), total, free)
