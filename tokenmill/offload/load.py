"""Loads a model of which only some layers, or some experts, stay on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch

from tokenmill.errors import ConfigError, ModelError
from tokenmill.model.layers import Weight
from tokenmill.model.spec import DecoderSpec
from tokenmill.offload.copy_experts import CopyExperts
from tokenmill.offload.copy_feed import CopyFeed, CudaStreams, Streams
from tokenmill.offload.disk_experts import DiskExperts, bring_expert
from tokenmill.offload.disk_feed import READERS, DiskFeed
from tokenmill.offload.expert_rooms import (
    ExpertLayer,
    ExpertRoom,
    check_alike,
    is_packed,
    one_expert,
    packed_room,
    stacked_bytes,
    stacked_room,
)
from tokenmill.offload.expert_slots import ExpertSlots
from tokenmill.offload.foresight import Foresight
from tokenmill.offload.image import Image, image_of, weights_in, write_image
from tokenmill.offload.layer_file import LayerFile, is_prepared, prepare, room
from tokenmill.offload.rotation import Rotation
from tokenmill.offload.streamed import CachedExpertWeights, StreamedWeights
from tokenmill.plan.solve.hardware import cpu_hardware
from tokenmill.plan.solve.offload import BUFFERS, CachedExperts, StreamedLayers
from tokenmill.quant.schemes.scheme import Schemes

PINNED = 0.9  # of the host's free memory: what may be taken where nothing of it can be swapped out again

Progress = Callable[[int, int, str], None]  # done, in all, what


class Parameters(Protocol):
    """Reads or draws those whose names are wanted, one after the other."""

    def __call__(
        self, wanted: Callable[[str], bool], tell: Callable[[int, int], None]
    ) -> Iterator[tuple[str, Weight]]: ...


def stream_from_disk(
    folder: Path,  # of the prepared layers, which are made where they are not there
    spec: DecoderSpec,
    parameters: Parameters,
    dtype: torch.dtype,
    schemes: Schemes,
    away: StreamedLayers,
    nbytes: int,  # about, of all layers
    tell: Progress,
) -> StreamedWeights:
    if not is_prepared(folder):
        each = parameters(is_of_layer, lambda done, total: tell(done, total, "preparing layers to stream"))
        prepare(folder, by_layer(each), nbytes)
    file = LayerFile(folder)
    if len(file.entries) != spec.num_layers:
        raise ModelError(
            f"{folder} has {len(file.entries)} layers, not {spec.num_layers}; remove it, and it is made again"
        )
    weights = dict(parameters(lambda name: not is_of_layer(name), lambda done, total: None))
    rotation, began, read = Rotation(away.layers), time.perf_counter(), 0
    buffers = [room(size) for size in rotation.sizes([one.image.nbytes for one in file.entries])]
    with ThreadPoolExecutor(READERS) as readers:
        for layer, entry in enumerate(file.entries):
            buffer = rotation.buffer_of.get(layer)
            memory = room(entry.image.nbytes) if buffer is None else buffers[buffer]
            if buffer is None or layer < BUFFERS:  # where none is resident, these say how fast they are read
                read += sum(readers.map(lambda piece: file.read(layer, piece, memory), range(entry.pieces)))  # noqa: B023
            weights |= weights_in(spec, entry.image, memory, dtype, schemes)
            tell(layer + 1, spec.num_layers, "reading the layers that stay")
    feed = DiskFeed(file, rotation, buffers, spec.num_layers, read / max(1e-9, time.perf_counter() - began))
    return StreamedWeights(spec, weights, dtype, torch.device("cpu"), feed)


def cache_from_disk(
    folder: Path,  # of the prepared experts, which are made where they are not there
    spec: DecoderSpec,
    parameters: Parameters,
    dtype: torch.dtype,
    schemes: Schemes,
    cached: CachedExperts,
    foresight: Foresight,
    tell: Progress,
) -> CachedExpertWeights:
    """Experts of a mixture; all the rest stays."""
    assert spec.moe is not None
    is_expert, count = _experts_of(spec), cached.experts
    if not is_prepared(folder):
        found = parameters(is_expert, lambda done, total: tell(done, total, "preparing experts"))
        each = (one_expert(its, expert) for its in by_layer(found) for expert in range(count))
        prepare(folder, each, count * sum(cached.each))
    indices = [index for index in range(spec.num_layers) if spec.is_moe(index)]
    file = LayerFile(folder, lambda entry: f"expert {entry % count} of layer {indices[entry // count]}")
    if len(file.entries) != len(indices) * count:
        raise ModelError(
            f"{folder} has {len(file.entries)} experts, not {len(indices) * count}; remove it, and it is made again"
        )
    weights = dict(
        parameters(lambda name: not is_expert(name), lambda done, total: tell(done, total, "loading weights"))
    )
    slots = ExpertSlots(len(indices), count, cached.slots)
    images = [
        [one.image for one in file.entries[first : first + count]] for first in range(0, len(file.entries), count)
    ]
    largest = max(one[0].nbytes for one in images)
    shared = [room(count * largest) for _ in range(BUFFERS)]
    layers: list[ExpertLayer] = []
    began, read = time.perf_counter(), 0
    with ThreadPoolExecutor(READERS) as readers:
        for number, (index, its) in enumerate(zip(indices, images, strict=True)):
            check_alike(its, index)
            size, buffer = its[0].nbytes, shared[slots.buffer_of(number)]
            router = weights[f"layers.{index}.router"]
            assert isinstance(router, torch.Tensor)
            if is_packed(its[0], index):
                own = room(cached.slots * size)
                places = [own[at * size : (at + 1) * size] for at in range(cached.slots)]
                places += [buffer[at * size : (at + 1) * size] for at in range(count)]
                layer = ExpertLayer(index, router, packed_room(spec, its[0], places, dtype, schemes), None, places)
            else:
                own = room(stacked_bytes(its[0], cached.slots))
                few = stacked_room(spec, its[0], cached.slots, own, dtype, schemes)
                whole = stacked_room(spec, its[0], count, buffer, dtype, schemes)
                layer = ExpertLayer(index, router, few, whole, ())
            layers.append(layer)
            weights |= layer.slots.weights
            first = [(number * count + expert, expert) for expert in range(cached.slots)]
            read += sum(readers.map(lambda one: bring_expert(file, layer, *one), first))  # noqa: B023
            for expert in range(cached.slots):
                slots.take(number, frozenset())
                slots.arrived(number, expert, expert)
            tell(number + 1, len(indices), "reading the first experts")
    speed = read / max(1e-9, time.perf_counter() - began)
    feed = DiskExperts(file, layers, slots, spec.moe, foresight, speed)
    return CachedExpertWeights(spec, weights, dtype, torch.device("cpu"), feed)


def cache_from_host(
    spec: DecoderSpec,
    parameters: Parameters,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    cached: CachedExperts,
    foresight: Foresight,
    tell: Progress,
    streams: Streams | None = None,  # None: the GPU's
) -> CachedExpertWeights:
    """All experts are made on the device, a layer at a time, and moved to pinned memory; the first ones stay."""
    assert spec.moe is not None
    is_expert, count = _experts_of(spec), cached.experts
    _check_host(count * sum(cached.each))
    streams = streams or CudaStreams(device)
    weights = dict(parameters(lambda name: not is_expert(name), lambda done, total: None))
    loading = by_layer(parameters(is_expert, lambda done, total: tell(done, total, "loading experts")))
    indices = [index for index in range(spec.num_layers) if spec.is_moe(index)]
    slots = ExpertSlots(len(indices), count, cached.slots)
    shared = [torch.empty(count * max(cached.each), dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
    layers: list[ExpertLayer] = []
    homes: list[ExpertRoom] = []
    for number, (index, its) in enumerate(zip(indices, loading, strict=True)):
        image, router = image_of(one_expert(its, 0)), weights[f"layers.{index}.router"]
        assert isinstance(router, torch.Tensor)
        own = torch.empty(stacked_bytes(image, cached.slots), dtype=torch.uint8, device=device)
        host = streams.host_memory(stacked_bytes(image, count))
        few, whole, home = (
            stacked_room(spec, image, places, memory, dtype, schemes)
            for places, memory in ((cached.slots, own), (count, shared[slots.buffer_of(number)]), (count, host))
        )
        for stack, kept, source in zip(home.stacks(), few.stacks(), ExpertRoom(its).stacks(), strict=True):
            stack.copy_(source)
            kept.copy_(source[: cached.slots])
        for expert in range(cached.slots):
            slots.take(number, frozenset())
            slots.arrived(number, expert, expert)
        layers.append(ExpertLayer(index, router, few, whole, ()))
        homes.append(home)
        weights |= few.weights
        del its
    feed = CopyExperts(homes, layers, slots, spec.moe, foresight, streams)
    return CachedExpertWeights(spec, weights, dtype, device, feed)


def _experts_of(spec: DecoderSpec) -> Callable[[str], bool]:
    names = {name for name, param in spec.parameters().items() if param.kind == "experts"}
    return names.__contains__


def stream_from_host(
    spec: DecoderSpec,
    parameters: Parameters,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    away: StreamedLayers,
    tell: Progress,
    streams: Streams | None = None,  # None: the GPU's
) -> StreamedWeights:
    """Streamed layers are made on the device, one at a time, and moved to pinned memory."""
    _check_host(away.nbytes)
    streams = streams or CudaStreams(device)
    rotation = Rotation(away.layers)
    weights: dict[str, Weight] = {}
    homes: dict[int, torch.Tensor] = {}
    images: dict[int, Image] = {}
    loading = parameters(is_of_layer, lambda done, total: tell(done, total, "loading weights"))
    for layer, its in enumerate(by_layer(loading)):
        if layer not in rotation.buffer_of:
            weights |= its
            continue
        images[layer] = image_of(its)
        homes[layer] = streams.host_memory(images[layer].nbytes)
        write_image(its, images[layer], homes[layer])
        del its
    weights |= dict(parameters(lambda name: not is_of_layer(name), lambda done, total: None))
    sizes = rotation.sizes([images[layer].nbytes if layer in images else 0 for layer in range(spec.num_layers)])
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for layer, image in images.items():
        weights |= weights_in(spec, image, buffers[rotation.buffer_of[layer]], dtype, schemes)
    return StreamedWeights(spec, weights, dtype, device, CopyFeed(homes, rotation, buffers, streams))


def _check_host(nbytes: int) -> None:
    free = cpu_hardware().free_bytes
    if nbytes > PINNED * free:
        raise ConfigError(
            f"{nbytes:,} bytes of weights do not fit on the GPU, and of the host's memory {free:,} are free, of which "
            f"{PINNED:.0%} may be pinned; use quantization, a smaller model, or a host with more memory"
        )


def is_of_layer(name: str) -> bool:
    return name.startswith("layers.")


def by_layer(parameters: Iterator[tuple[str, Weight]]) -> Iterator[dict[str, Weight]]:
    """Layer by layer: nobody here keeps one when the next is made."""
    for _, layer in groupby(parameters, key=lambda one: one[0].split(".")[1]):
        yield dict(layer)
