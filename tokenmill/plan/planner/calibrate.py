"""Calibration: fits the roofline's rates to this machine from a minute of timed steps, and keeps what it found."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.cache import figures_dir
from tokenmill.plan.planner.fit import Fitted, fit
from tokenmill.plan.planner.precision import guard_of
from tokenmill.plan.planner.probe import CPU_POINTS, GPU_POINTS, Probe, Timed, runner_of
from tokenmill.plan.solve.hardware import Hardware
from tokenmill.plan.solve.memory import ModelBytes
from tokenmill.plan.solve.roofline import ElementBytes, Rates, Roofline
from tokenmill.plan.solve.shape import ONE_GPU, ModelShape

if TYPE_CHECKING:
    from tokenmill.config import EngineConfig
    from tokenmill.engine.build import Built

VERSION = 3  # of the files kept
BUDGET = 0.6  # seconds per point
CPU_START = Rates(
    weight_bytes=1.5e10,
    kv_bytes=1e10,
    linear_flops=3e11,
    stacked_flops=1e11,
    attention_flops=5e10,
    traffic_bytes=1e10,
    logit_s=1e-9,
    row_s=2e-5,
    step_s=2e-4,
    layer_s=1e-5,
    eager_s=1e-4,
    overlapped=False,
)
GPU_START = Rates(
    weight_bytes=2.5e12,
    kv_bytes=2.4e12,
    linear_flops=5e14,
    stacked_flops=4e14,
    attention_flops=3.5e14,
    traffic_bytes=1.2e12,
    logit_s=5e-12,
    row_s=5e-7,
    step_s=3e-5,
    layer_s=2e-5,
    eager_s=4e-4,
    overlapped=True,
)

Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class MachineCalibration:
    """What a machine does with one model at one set of settings."""

    machine: str
    model: str
    settings: dict[str, Any]
    element_bytes: ElementBytes
    sizes: ModelBytes
    rates: Rates
    points: tuple[tuple[str, float, float], ...]  # (name, seconds measured, relative error of the fit)

    def step_time(self, shape: ModelShape) -> Roofline:
        return Roofline(shape, self.element_bytes, self.rates)

    @property
    def worst(self) -> float:
        return max(abs(error) for _, _, error in self.points)


def calibrate(config: EngineConfig, tell: Tell | None = None, *, again: bool = False) -> MachineCalibration:
    """The kept calibration of this machine, model and settings, or a new one (which takes about a minute)."""
    from tokenmill.engine.build import build
    from tokenmill.engine.choices import choose_device, hardware_of

    hardware = hardware_of(choose_device(config.device))
    path = kept_at(config, hardware)
    if path.is_file() and not again:
        kept = _read(path)
        if kept is not None:
            return kept
    built = build(config, tell)
    try:
        found = calibrate_built(built, config, hardware, tell)
    finally:
        built.engine.close()
    with contextlib.suppress(OSError):  # where nothing can be kept, the next time takes its minute again
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": VERSION, **asdict(found)}, indent=1))
    return found


def calibrate_built(
    built: Built, config: EngineConfig, hardware: Hardware, tell: Tell | None = None
) -> MachineCalibration:
    """Time a dozen steps of this engine and fit. The engine cannot be used afterwards."""
    probe = Probe(built)
    points = [point for point in (GPU_POINTS if hardware.device == "cuda" else CPU_POINTS) if probe.fits(point)]
    timed: list[Timed] = []
    for number, point in enumerate(points):
        timed.append(probe.time(point, BUDGET))
        if tell is not None:
            tell(number + 1, len(points), "timing steps")
    element_bytes, sizes = built_element_bytes(built, probe.shape)
    fitted = fit_steps(probe.shape, element_bytes, timed, GPU_START if hardware.device == "cuda" else CPU_START)
    return MachineCalibration(
        machine=_machine(hardware),
        model=built.files.name,
        settings=_settings(config),
        element_bytes=element_bytes,
        sizes=sizes,
        rates=fitted.rates,
        points=tuple((one.point.name, one.seconds, error) for one, error in zip(timed, fitted.errors)),
    )


def fit_steps(shape: ModelShape, element_bytes: ElementBytes, timed: Sequence[Timed], start: Rates) -> Fitted:
    steps = [one.point.facts(shape) for one in timed]

    def predict(rates: Rates) -> list[float]:
        model = Roofline(shape, element_bytes, rates)
        return [model.seconds(facts) for facts in steps]

    return fit(start, predict, [one.seconds for one in timed])


def built_element_bytes(built: Built, shape: ModelShape) -> tuple[ElementBytes, ModelBytes]:
    """How a built engine stores things, read off its weights, and what its memory plan began with."""
    decoder = runner_of(built).decoder
    weights, spec, settings = decoder.weights, built.spec, built.settings
    itemsize = weights.dtype.itemsize
    linear = sum(_stored(one) for layer in range(spec.num_layers) for one in weights.peek(layer).linears())
    kv_per_token = settings.memory.kv // (settings.num_blocks * settings.block_size)
    element_bytes = ElementBytes(
        weight=linear / shape.linear,
        other=itemsize,
        kv=kv_per_token / shape.kv_elements,
        activation=itemsize,
        rounded_head=_stored(weights.lm_head) / shape.head,
    )
    # Products of quantized weights may copy their inputs; never more than all that is alive in a layer.
    copies = shape.activation if element_bytes.weight < itemsize else 0
    return element_bytes, ModelBytes(
        weights=settings.memory.weights,
        kv_per_token=kv_per_token,
        activation_per_token=shape.activation * itemsize + copies,
        logits_per_row=shape.vocab * (itemsize + max(4, itemsize)),
        vocab=shape.vocab,
        rope_per_position=4 * shape.rope_dims,
        flops_per_token=2.0 * shape.active,
        guard=guard_of(shape, ONE_GPU) if settings.memory.guard else 0,
        guard_per_token=shape.activation * (4 - itemsize) if settings.memory.guard else 0,
    )


def _stored(linear: Any) -> int:
    """Bytes of a linear layer's storage; counters of arriving tiles do not count."""
    return sum(tensor.nbytes for name, tensor in linear.storage.items() if name != "counters")


def kept_at(config: EngineConfig, hardware: Hardware) -> Path:
    known = json.dumps([VERSION, _machine(hardware), _settings(config)], sort_keys=True)
    return figures_dir("plan", config.cache_dir) / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


def _settings(config: EngineConfig) -> dict[str, Any]:
    """What changes how long a step takes. Sizes of tables do not."""
    names = ("model", "load_format", "dtype", "device", "quantization", "kv_cache_dtype", "cuda_graphs", "ops")
    found = {name: getattr(config, name) for name in names}
    return {name: dict(one) if isinstance(one, dict) else one for name, one in found.items()}


def _machine(hardware: Hardware) -> str:
    import torch

    threads = f", {torch.get_num_threads()} threads" if hardware.device == "cpu" else ""
    return f"{platform.node()}: {hardware.name}{threads}, torch {torch.__version__}"


def _read(path: Path) -> MachineCalibration | None:
    """A kept calibration; None where it is of another version or broken."""
    try:
        kept = json.loads(path.read_text())
        if kept.pop("version") != VERSION:
            return None
        return MachineCalibration(
            machine=kept["machine"],
            model=kept["model"],
            settings=kept["settings"],
            element_bytes=ElementBytes(**kept["element_bytes"]),
            sizes=ModelBytes(
                **kept["sizes"] | {name: tuple(kept["sizes"][name]) for name in ("layers", "expert_bytes")}
            ),
            rates=Rates(**kept["rates"]),
            points=tuple((name, seconds, error) for name, seconds, error in kept["points"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
