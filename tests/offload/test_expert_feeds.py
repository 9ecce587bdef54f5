"""Slots of experts, whether foreseeing pays, and copies to a device with streams: each against what it stands for."""

import os
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, write_tiny

from tokenmill.errors import ModelError, PeerLostError
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.checkpoint import read_config
from tokenmill.model.weights.dummy import draw_parameters, dummy_weights
from tokenmill.model.widened import WidenedWeights
from tokenmill.offload.disk_experts import OVER
from tokenmill.offload.expert_rooms import is_packed
from tokenmill.offload.expert_slots import AWAY, ExpertSlots, Told
from tokenmill.offload.foresight import RETRY, WINDOW, Foresight
from tokenmill.offload.image import Image, Part
from tokenmill.offload.load import cache_from_host
from tokenmill.ops.native.layer_wait import fetch_experts
from tokenmill.plan.solve.offload import NO_EXPERTS_AWAY, CachedExperts, most_slots
from tokenmill.quant.schemes.choose import ComputeTarget, choose_schemes
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.scheme import Schemes
from tokenmill.quant.tool.evaluate import hidden_of

EXPERTS = 8
MIXTRAL = TINY | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2, "num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
}  # fmt: skip


@given(st.lists(st.integers(1, 50_000), max_size=60), st.integers(1, 200), st.integers(0, 10**6), st.integers(0, 10**6))
def test_as_many_experts_stay_as_leave_what_is_wanted(each, experts, freed, away):
    found = most_slots(each, experts, freed=freed, away=away)
    every = [CachedExperts(slots, experts, most_slots(each, experts).each or found.each) for slots in range(1, experts)]
    fitting = [one for one in every if one.each and one.freed >= max(1, freed) and one.nbytes >= away]
    assert found == (fitting[-1] if fitting else NO_EXPERTS_AWAY)
    assert found.freed == found.nbytes - found.buffers


@settings(max_examples=200)
@given(st.integers(1, 6), st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4), max_size=80))
def test_who_was_chosen_longest_ago_leaves_first(count, choices):
    """Held against an ordered dictionary, of choices that fit."""
    slots, reference = ExpertSlots(1, EXPERTS, count), OrderedDict()
    hits = misses = 0
    for chosen in choices:
        if len(chosen) > count:
            continue
        slots.call(0, chosen)
        hits, misses = hits + len(chosen & reference.keys()), misses + len(chosen - reference.keys())
        for expert in sorted(chosen - reference.keys()):
            slot, before = slots.take(0, chosen)
            assert before not in chosen
            if len(reference) == count:
                oldest = next(one for one in reference if one not in chosen)
                ages = [int(slots.used[0, one]) for one in reference if one not in chosen]
                assert slots.used[0, before] == slots.used[0, oldest] == min(ages)
                del reference[before]
            slots.arrived(0, slot, expert)
            reference[expert] = None
        for expert in chosen:
            reference.move_to_end(expert)
        slots.check_integrity()
        assert {one for one in range(EXPERTS) if slots.slot[0, one] >= 0} == set(reference)
    found = slots.counts()
    assert (found.hits, found.misses, found.foreseen) == (hits, misses, 0)


def test_a_slot_that_is_taken_is_nobodys_until_somebody_arrives_or_goes_back():
    slots = ExpertSlots(1, EXPERTS, 1)
    slots.arrived(0, slots.take(0, ())[0], 5)
    assert slots.take(0, {5}) is None
    slot, before = slots.take(0, ())
    assert (before, slots.place(0, 5), slots.take(0, ())) == (5, AWAY, None)
    slots.give_back(0, slot, before)
    assert slots.place(0, 5) == slot
    slots.failed(0, slots.take(0, ())[0])
    slots.check_integrity()
    assert slots.take(0, ()) == (slot, AWAY)


def test_slots_that_nobody_comes_to_are_freed():
    slots = ExpertSlots(2, EXPERTS, 2)
    taken = [slots.take(number, frozenset())[0] for number in (0, 0, 1)]
    slots.free_taken({(0, taken[0]), (1, None)})
    assert slots.take(0, frozenset()) == (taken[1], AWAY) and slots.take(0, frozenset()) is None
    assert {slots.take(1, frozenset())[0] for _ in range(2)} == {0, 1}
    slots.check_integrity()


class Waiting:
    """A call of the library that waits for expert 3, and for all others in slots; `answer` is the worker's side."""

    def __init__(self, answer, times=1, slot=3):
        self.slots, self.answer = ExpertSlots(1, EXPERTS, EXPERTS), answer
        self.slots.slot[0] = range(EXPERTS)
        self.slots.slot[0, 3] = slot
        self.over = threading.Event()
        listen, bell = os.pipe()
        os.set_blocking(bell, False)
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            chosen = torch.arange(EXPERTS).repeat(512).view(-1, 2)
            slots = self.slots
            of_layer = slots.slot[0], slots.buffer[0], slots.owner, slots.used[0], slots.early[0]
            self.places = [
                fetch_experts(chosen, slots.told, *of_layer, 0, slots.slots, True, bell) for _ in range(times)
            ]
        finally:
            self.over.set()
            thread.join()
            os.close(bell)
            os.close(listen)
        self.expected = chosen

    def asked(self):
        return abs(self.slots.told[Told.ANSWERED]) < self.slots.told[Told.ASKED]

    def _work(self):
        while not self.over.is_set():
            self.answer(self)


def test_no_expert_is_left_out_whose_slot_is_taken_and_given_back_meanwhile():
    def answer(call):
        slots = call.slots
        slots.slot[0, 3] = AWAY
        if call.asked():
            slots.slot[0, 3] = 3
            slots.told[Told.ANSWERED] = slots.told[Told.ASKED]
            return
        slots.slot[0, 3] = 3

    call = Waiting(answer, times=300)
    for places in call.places:
        assert torch.equal(places, call.expected)


def test_an_answer_without_the_expert_is_asked_for_again():
    answers = []

    def answer(call):
        if call.asked():
            answers.append(call.slots.told[Told.CALL])
            call.slots.slot[0, 3] = 3 if len(answers) == 3 else AWAY
            call.slots.told[Told.ANSWERED] = call.slots.told[Told.ASKED]

    call = Waiting(answer, slot=AWAY)
    assert torch.equal(call.places[0], call.expected)
    assert answers == [1, 1, 1] and call.slots.told[Told.STALLS] == 3 and call.slots.told[Told.MISSES] == 1


def test_who_waits_is_told_that_nobody_answers_any_more():
    def answer(call):
        if call.asked():
            call.slots.told[Told.ANSWERED] = OVER

    with pytest.raises(PeerLostError):
        Waiting(answer, slot=AWAY)


def test_a_buffer_is_one_layers_at_a_time():
    slots = ExpertSlots(4, EXPERTS, 2)
    slots.own(1)
    slots.buffer[1, 3] = 1
    assert slots.place(1, 3) == 2 + 3 and slots.place(3, 3) == AWAY
    slots.own(3)
    assert slots.place(1, 3) == AWAY and slots.place(3, 3) == AWAY


def run_windows(foresight, windows, costs):
    """How many of the windows were with foresight, at a cost per call of either way."""
    spent, told = 0.0, 0
    for number in range(windows):
        told += foresight.on
        spent += WINDOW * costs[foresight.on]
        foresight.note((number + 1) * WINDOW, spent)
    return told


def test_what_is_foreseen_is_brought_only_where_that_pays():
    windows = 4 * RETRY
    assert run_windows(Foresight(), windows, {False: 1.0, True: 0.5}) > windows * 3 // 4
    for costs in ({False: 1.0, True: 1.0}, {False: 1.0, True: 2.0}, {False: 0.0, True: 0.0}):
        assert 1 <= run_windows(Foresight(), windows, costs) <= windows // 4  # it is tried again now and then
    assert run_windows(Foresight(False), windows, {False: 9.0, True: 1.0}) == 0
    assert run_windows(Foresight(True), windows, {False: 1.0, True: 9.0}) == windows


class FakeStreams:
    """Copies run in their order, as late as allowed or at once; and it is seen who waited for whom."""

    def __init__(self, late: bool) -> None:
        self.late, self.pending = late, []

    def host_memory(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def computed(self):
        return object()

    def copy(self, into, source, after):
        assert after is not None
        for event, reads in list(self.pending):
            if reads == into.data_ptr():  # an earlier copy, which comes first
                self.compute_after(event)
        into.view(torch.uint8).fill_(255)  # whoever does not wait computes with this
        event = [lambda: into.copy_(source)]
        self.pending.append((event, source.data_ptr()))
        if not self.late:
            self.compute_after(event)
        return event

    def compute_after(self, event):
        while event:
            first, _ = self.pending.pop(0)
            first.pop()()


def stores(folder, slots, cache, late, form=None, dtype=torch.float32):
    spec = spec_from_config(read_config(Path(write_tiny(folder, **MIXTRAL))))
    place, schemes = torch.device("cpu"), Schemes(Dense())
    if form is not None:
        from tokenmill.engine.choices import matrix_shapes
        from tokenmill.quant.forms import parse_layout

        target = ComputeTarget(place, dtype, native=False)
        schemes = choose_schemes(parse_layout(form), matrix_shapes(spec), {}, False, target)
    parameters = lambda wanted, tell: draw_parameters(spec, dtype, place, 0, schemes, tell, wanted)  # noqa: E731
    itemsize, elements = dtype.itemsize, 3 * MIXTRAL["hidden_size"] * MIXTRAL["intermediate_size"]
    cached = CachedExperts(slots, EXPERTS, (elements * itemsize + 4096,) * spec.num_layers)
    foresight = Foresight({"lru": False, "predict": True}[cache])
    weights = cache_from_host(
        spec,
        parameters,
        dtype,
        place,
        schemes,
        cached,
        foresight,
        lambda *_: None,
        FakeStreams(late),  # type: ignore[arg-type]
    )
    resident = dummy_weights(spec, dtype, place, 0, schemes) if form else dummy_weights(spec, dtype, place, 0)
    return spec, resident, weights


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("cache", ["lru", "predict"])
@pytest.mark.parametrize("form", [None, "int8"])
def test_a_device_with_streams_computes_what_resident_experts_do(form, cache, late, tmp_path):
    for slots in (1, 3, 6):
        spec, resident, weights = stores(tmp_path / "m", slots, cache, late, form)
        for tokens in (1, 2, 10):  # from fewer experts than there are slots to all of them
            for turn in range(3):
                ids = torch.arange(3 + turn, 3 + turn + 2 * tokens).view(2, tokens)
                assert torch.equal(hidden_of(spec, weights, ids), hidden_of(spec, resident, ids))
        found = weights.feed.stats()
        assert found.nbytes > 0 and found.experts.misses > 0
        assert (found.experts.foreseen > 0) == (cache == "predict")
        weights.feed.slots.check_integrity()


def test_rows_that_are_computed_again_in_float32_get_the_same_experts(tmp_path):
    spec, resident, weights = stores(tmp_path / "m", 3, "predict", True, dtype=torch.bfloat16)
    for tokens in (1, 10):
        ids = torch.arange(3, 3 + 2 * tokens).view(2, tokens)
        expected = hidden_of(spec, WidenedWeights(resident, 1 << 12), ids)
        assert torch.equal(hidden_of(spec, WidenedWeights(weights, 1 << 12), ids), expected)


def test_experts_that_are_packed_by_half_are_refused():
    up, down = (Part(name, "", 0, 64, "uint8", (64,), form=1) for name in ("up", "down"))
    floats = replace(down, form=-1, dtype="float32", shape=(16,))
    assert is_packed(Image((up, down), 4096), 3)
    assert not is_packed(Image((floats,), 4096), 3)
    with pytest.raises(ModelError, match=r"experts of layer 3 have one matrix .* set expert_cache='off'"):
        is_packed(Image((up, floats), 4096), 3)
