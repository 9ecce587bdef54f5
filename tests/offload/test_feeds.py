"""Feeds: whatever order layers are asked in, what is computed with is the layer that was asked for."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tiny

from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.checkpoint import read_config
from tokenmill.model.weights.dummy import draw_parameters, dummy_weights
from tokenmill.offload.copy_feed import CopyFeed
from tokenmill.offload.disk_feed import DiskFeed
from tokenmill.offload.layer_file import LayerFile, prepare, room
from tokenmill.offload.load import stream_from_host
from tokenmill.offload.rotation import Rotation
from tokenmill.plan.solve.offload import BUFFERS, StreamedLayers, hiding_tokens, spread, streamed, to_free, to_hold
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.scheme import Schemes
from tokenmill.quant.tool.evaluate import hidden_of

SIZES = st.lists(st.integers(1, 1000), min_size=2 * BUFFERS, max_size=90)


@given(SIZES, st.integers(1, 50_000))
def test_as_few_layers_are_away_as_free_what_is_wanted(sizes, wanted):
    found = to_free(sizes, wanted)
    every = [streamed(sizes, count) for count in range(2 * BUFFERS, len(sizes) + 1, BUFFERS)]
    if found is None:
        assert all(one.freed < wanted for one in every)
        return
    assert found.freed >= wanted and found.nbytes == sum(sizes[layer] for layer in found.layers)
    assert all(one.freed < wanted for one in every if len(one.layers) < len(found.layers))
    rooms = Rotation(found.layers).sizes(sizes)
    assert found.buffers == sum(rooms)
    held = to_hold(sizes, wanted)
    assert held.nbytes >= wanted or len(held.layers) >= len(sizes) - 1


@given(st.integers(4, 130), st.data())
def test_streamed_layers_are_spread_evenly_and_take_turns(layers, data):
    count = data.draw(st.integers(2, layers // 2)) * 2
    if count > layers:
        return
    away = spread(count, layers)
    assert len(set(away)) == count and list(away) == sorted(away) and away[0] >= 0 and away[-1] < layers
    gaps = [after - before for before, after in pairwise(away)] + [away[0] + layers - away[-1]]
    assert max(gaps) - min(gaps) <= 1
    rotation = Rotation(away)
    for layer in range(layers):
        wanted = rotation.wanted(layer)
        assert wanted[0] == min((one for one in away if one >= layer), default=away[0])
        assert len({rotation.buffer_of[one] for one in wanted}) == BUFFERS


def test_steps_that_hide_the_stream():
    assert hiding_tokens(1.0, 0.001) == 950
    assert StreamedLayers((0, 1, 2, 3), 4_000, 2_000).seconds(1_000) == 4


def file_of(folder: Path, layers: int, size: int) -> LayerFile:
    """Layer n is full of the number n."""
    prepare(
        folder / "made", [{f"layers.{n}.o.bias": torch.full((size,), n, dtype=torch.uint8)} for n in range(layers)], 0
    )
    return LayerFile(folder / "made")


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_layers_finds_each_in_its_buffer(seed, tmp_path):
    layers, size, rng = 9, 3 << 20, random.Random(seed)
    rotation = Rotation(spread(rng.choice([4, 6, 8]), layers))
    buffers = [room(size) for _ in range(BUFFERS)]
    feed = DiskFeed(file_of(tmp_path, layers, size), rotation, buffers, layers)
    order = [layer for _ in range(3) for layer in range(layers)] + [rng.randrange(layers) for _ in range(60)]
    for layer in order:
        feed.enter(layer)
        if layer in rotation.buffer_of:
            for _ in range(rng.randrange(3)):  # all the while it is computed
                seen = buffers[rotation.buffer_of[layer]]
                assert int(seen.min()) == int(seen.max()) == layer
    assert feed.stats().layers >= 2 * len(rotation.layers)
    feed.close()


class FakeStreams:
    """Copies run as late as allowed, when somebody waits for them, or at once; and it is seen who waited for whom."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.launched = 0  # what the computing stream has been given

    def host_memory(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def computed(self):
        return self.launched

    def copy(self, into, source, after):
        assert after == self.launched  # nothing that was launched may still read the buffer
        into.fill_(255)  # whoever does not wait computes with this

        pending = [lambda: into.copy_(source)]
        if not self.late:
            pending.pop()()
        return pending

    def compute_after(self, event):
        self.launched += 1
        while event:
            event.pop()()


@pytest.mark.parametrize("late", [True, False])
def test_a_device_with_streams_computes_what_resident_weights_do(late, tmp_path):
    spec = spec_from_config(read_config(Path(write_tiny(tmp_path / "m", num_hidden_layers=6))))
    schemes, place, dtype = Schemes(Dense()), torch.device("cpu"), torch.float32
    ids = torch.arange(3, 23).view(2, 10)
    plain = hidden_of(spec, dummy_weights(spec, dtype, place, 0), ids)
    parameters = lambda wanted, tell: draw_parameters(spec, dtype, place, 0, schemes, tell, wanted)  # noqa: E731
    for count in (4, 6):
        away, streams = streamed([1] * 6, count), FakeStreams(late)
        weights = stream_from_host(
            spec,
            parameters,
            dtype,
            place,
            schemes,
            away,
            lambda *_: None,
            streams,  # type: ignore[arg-type]
        )
        for _ in range(3):
            assert torch.equal(hidden_of(spec, weights, ids), plain)
        feed = weights.feed
        assert isinstance(feed, CopyFeed)
        assert feed.stats().layers >= 3 * count - BUFFERS
