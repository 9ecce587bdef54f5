"""Candidates: every way to run a model on some machines that fits their memory, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from tokenmill.errors import ConfigError
from tokenmill.parallel.layout import MAX_RANKS
from tokenmill.plan.planner.precision import (
    ITEMSIZE,
    KV_PRECISIONS,
    WEIGHT_PRECISIONS,
    KVPrecision,
    WeightPrecision,
    element_bytes_of,
    rank_bytes,
)
from tokenmill.plan.planner.queueing import Capacity
from tokenmill.plan.solve.gpus import WEIGHT_ONLY_ROWS, Gpu, rates_of
from tokenmill.plan.solve.hardware import Hardware
from tokenmill.plan.solve.memory import MemoryPlan, ModelBytes, plan_memory
from tokenmill.plan.solve.roofline import ElementBytes, Link, Roofline, Stream
from tokenmill.plan.solve.shape import ONE_GPU, ModelShape, Split

BLOCK = 16
NARROW = ("bfloat16", "float16")
STEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
ROWS = (1024, 256, 64)
MORE = 1.2
UTILIZATION = 0.9  # the engine's default


@dataclass(frozen=True)
class ReplicaLayout:
    """One copy of the model: how numbers are stored and how it is divided."""

    weights: WeightPrecision
    kv: KVPrecision
    dtype: str
    split: Split

    @property
    def loss(self) -> int:
        return max(self.weights.loss, self.kv.loss)

    @property
    def name(self) -> str:
        kv = "" if self.kv.dtype == "auto" else f", {self.kv.dtype} kv"
        weights = self.weights.quantization or self.weights.stored or self.dtype
        return f"{weights}{kv}, {self.split.name}"


@dataclass(frozen=True)
class Placement:
    """A layout with sizes that its machine has memory for."""

    layout: ReplicaLayout
    step_time: Roofline
    room: Capacity  # of the whole copy
    memory: MemoryPlan  # of its fullest GPU


class Fleet(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str:
        """What computes: cpu or cuda."""
        ...

    @property
    def gpus(self) -> int: ...

    @property
    def link(self) -> Link: ...

    @property
    def host_bytes_per_s(self) -> float | None:
        """Between a GPU and its host's memory; None: not known."""
        ...

    def dtype_reason(self, shape: ModelShape) -> str:
        """Why floats are what a layout says."""
        ...

    def streaming(self) -> Fleet | None:
        """The same, with layers that do not fit brought in every step; None: it does not, or does already."""
        ...

    def layouts(self, shape: ModelShape, most_loss: int) -> Iterator[ReplicaLayout]:
        """Ways to store and divide a model, fewest GPUs first."""
        ...

    def place(
        self, shape: ModelShape, layout: ReplicaLayout, *, longest: int, rows: int, step_tokens: int
    ) -> Placement:
        """Put a layout into memory, or say in a ConfigError why it does not fit. `longest` is the longest request."""
        ...


@dataclass(frozen=True)
class GpuFleet:
    """GPUs of one kind, known by their figures."""

    gpu: Gpu
    gpus: int
    divide: bool = True  # a copy may take several
    stored: WeightPrecision | None = (
        None  # of a quantized checkpoint, which stays as it is; None: floats, rounded or not
    )
    floats: str = ""  # what there is to say of the checkpoint's floats, where it was not saved as such
    streams: bool = False  # layers that do not fit are brought from the host's memory

    @property
    def name(self) -> str:
        return f"{self.gpus} x {self.gpu.name}" if self.gpus > 1 else self.gpu.name

    @property
    def device(self) -> str:
        return "cuda"

    @property
    def link(self) -> Link:
        return self.gpu.link

    @property
    def host_bytes_per_s(self) -> float | None:
        return self.gpu.host

    def dtype_reason(self, shape: ModelShape) -> str:
        if self.floats:
            return self.floats
        if self.stored is not None:
            return "of what is not quantized, and of products"
        if shape.saved_dtype in NARROW:
            return "as the checkpoint was saved"
        return f"half the bytes of {shape.saved_dtype}, in which it was saved" if shape.saved_dtype else "the usual one"

    def streaming(self) -> Fleet | None:
        return None if self.streams else replace(self, streams=True)

    def layouts(self, shape: ModelShape, most_loss: int) -> Iterator[ReplicaLayout]:
        dtype = shape.saved_dtype if shape.saved_dtype in NARROW else NARROW[0]
        for split in splits(shape, self.gpus if self.divide and not self.streams else 1):
            for weights in WEIGHT_PRECISIONS if self.stored is None else (self.stored,):
                for kv in KV_PRECISIONS:
                    layout = ReplicaLayout(weights, kv, dtype, split)
                    forms = weights.quantization or "", kv.dtype
                    if layout.loss <= most_loss and all(map(self.gpu.computes, forms)):
                        yield layout

    def place(
        self, shape: ModelShape, layout: ReplicaLayout, *, longest: int, rows: int, step_tokens: int
    ) -> Placement:
        weights = layout.weights.quantization
        if weights in ("int8", "int4") and rows > WEIGHT_ONLY_ROWS:
            raise ConfigError(f"with more than {WEIGHT_ONLY_ROWS} rows {weights} is slower than floats")
        element_bytes = layout_element_bytes(shape, layout)
        model = rank_bytes(shape, element_bytes, layout.split, ITEMSIZE[layout.dtype])
        stored = layout.weights
        if stored.efficiency == "fp8" and not self.gpu.computes("fp8"):  # its weights are multiplied with 16-bit inputs
            stored = replace(stored, efficiency="int8")
        model = replace(model, scratch=_scratch(stored) // layout.split.tensor)
        hardware = Hardware("cuda", self.gpu.name, self.gpu.memory, self.gpu.memory)
        memory = _memory(shape, model, hardware, longest, rows, step_tokens, None if self.streams else 0)
        # Stages of a pipeline hold the same tokens; ranks of an expert split each hold tokens of their own.
        tokens = memory.num_blocks * BLOCK * layout.split.expert
        moved, efficiency = _moved(stored, element_bytes, rows)
        away, cached = memory.streamed, memory.cached
        stream = Stream(away.nbytes, self.gpu.host) if away.layers else None
        stream = Stream(cached.nbytes, self.gpu.host, by_expert=True) if cached.slots else stream
        step_time = Roofline(shape, moved, rates_of(self.gpu, efficiency), layout.split, self.gpu.link, stream)
        return Placement(layout, step_time, Capacity(rows, step_tokens, tokens), memory)


@dataclass(frozen=True)
class LocalFleet:
    """This machine and one model on it, known by measurement: only sizes are open."""

    step_time: Roofline
    sizes: ModelBytes
    hardware: Hardware
    dtype: str = "as it runs here"
    gpus: int = 1

    @property
    def name(self) -> str:
        return f"this machine ({self.hardware.name})"

    @property
    def device(self) -> str:
        return self.hardware.device

    @property
    def link(self) -> Link:
        return Link(1e9, 1e-4)  # never used: there is one

    @property
    def host_bytes_per_s(self) -> float | None:
        return None  # what copies between two places of its memory cost was not measured

    def dtype_reason(self, shape: ModelShape) -> str:
        return "as it was measured"

    def streaming(self) -> Fleet | None:
        return None  # it was measured as it is

    def layouts(self, shape: ModelShape, most_loss: int) -> Iterator[ReplicaLayout]:
        yield ReplicaLayout(WEIGHT_PRECISIONS[0], KV_PRECISIONS[0], self.dtype, ONE_GPU)

    def place(
        self, shape: ModelShape, layout: ReplicaLayout, *, longest: int, rows: int, step_tokens: int
    ) -> Placement:
        memory = _memory(shape, self.sizes, self.hardware, longest, rows, step_tokens)
        return Placement(layout, self.step_time, Capacity(rows, step_tokens, memory.num_blocks * BLOCK), memory)


def _scratch(weights: WeightPrecision) -> int:
    """Bytes that a product of stored weights needs beside them while it runs."""
    # For many rows a matrix is widened, in float32 where those that overflow are computed again.
    return 4 * weights.widest if weights.efficiency in ("int8", "int4") else 0


def _moved(weights: WeightPrecision, element_bytes: ElementBytes, rows: int) -> tuple[ElementBytes, str]:
    """What a step moves, and which rates it has: stored weights may have to become floats for every product."""
    more = 0.0  # bytes per weight
    if weights.stored and weights.efficiency in ("int8", "int4") and rows > WEIGHT_ONLY_ROWS:
        more = 2 * element_bytes.activation  # written as floats, and read
    if not more:
        return element_bytes, weights.efficiency
    head = None if element_bytes.rounded_head is None else element_bytes.rounded_head + more
    return replace(element_bytes, weight=element_bytes.weight + more, rounded_head=head), "dense"


def splits(shape: ModelShape, gpus: int) -> Iterator[Split]:
    """Powers of two that divide the model evenly, as an engine takes them (`parallel`), fewest GPUs first."""
    powers = [1 << power for power in range(gpus.bit_length()) if 1 << power <= gpus]
    found = [
        Split(tensor, pipeline, expert)
        for tensor in powers
        for pipeline in powers
        for expert in powers
        if tensor * pipeline * expert <= gpus
        and tensor * pipeline * expert <= MAX_RANKS
        and tensor in (shape.tensors if expert == 1 else shape.tensors_beside_experts)
        and pipeline <= shape.layers
        and (expert == 1 or (shape.experts and shape.experts % (tensor * expert) == 0 and pipeline == 1))
    ]
    yield from sorted(found, key=lambda one: (one.gpus, one.pipeline, one.expert))


def layout_element_bytes(shape: ModelShape, layout: ReplicaLayout) -> ElementBytes:
    # Elements that share a scale: a head's keys, or its values.
    per_head = max(1, shape.kv_elements // (2 * shape.layers * shape.kv_heads))
    return element_bytes_of(layout.weights, layout.kv, ITEMSIZE[layout.dtype], per_head)


def placements(fleet: Fleet, shape: ModelShape, layout: ReplicaLayout, longest: int) -> tuple[list[Placement], str]:
    """All sizes of steps and batches that fit; else the reason of the smallest."""
    found: list[Placement] = []
    reason = ""
    for step_tokens in STEP_TOKENS:
        tokens = 0
        for rows in (rows for rows in ROWS if rows <= step_tokens):
            try:
                placement = fleet.place(shape, layout, longest=longest, rows=rows, step_tokens=step_tokens)
            except ConfigError as error:
                reason = str(error) if step_tokens == STEP_TOKENS[0] else reason
                continue
            if placement.room.kv_tokens > MORE * tokens:  # fewer rows are worth a look only where they leave more room
                found.append(placement)
                tokens = placement.room.kv_tokens
    return found, "" if found else reason


def _memory(
    shape: ModelShape,
    model: ModelBytes,
    hardware: Hardware,
    longest: int,
    rows: int,
    step_tokens: int,
    offload: int | None = 0,
) -> MemoryPlan:
    return plan_memory(
        model,
        hardware,
        utilization=UTILIZATION,
        block_size=BLOCK,
        max_rows=rows,
        max_step_tokens=step_tokens,
        max_len=longest,
        longest=shape.max_positions,
        kv_bytes=None,
        offload=offload,
    )[0]
