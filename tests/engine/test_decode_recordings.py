"""Which recorded size serves a decode step: batches that end or fill pass through many sizes for a step or two."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from tokenmill.engine.runner.recordings import PATIENCE, PLAIN, STRETCH, Kind, Recording, Recordings, bucket_sizes
from tokenmill.engine.runner.warmup import sizes_to_record
from tokenmill.sampling.settings import Traits

SIZES = bucket_sizes(512)


def run(recordings: Recordings, rows: int, traits: Traits = PLAIN, kind: Kind = Kind.PLAIN) -> tuple[int, str]:
    """What the runner does with a step: the size it is run at, and how."""
    size, recording = recordings.serve(rows, traits, kind)
    recording.uses += 1
    if recording.graph is not None:
        return size, "replay"
    if not recordings.is_due(recording):
        return size, "plain"
    recording.graph = cast(Any, object())
    return size, "record"


def record(recordings: Recordings, rows: int, **how: Any) -> None:
    while run(recordings, rows, **how)[1] != "record":
        pass


def test_a_size_is_run_plainly_then_recorded_then_replayed() -> None:
    recordings = Recordings(SIZES)
    assert [run(recordings, 60) for _ in range(4)] == [(64, "plain"), (64, "record"), (64, "replay"), (64, "replay")]
    assert [run(recordings, 65)[1] for _ in range(3)] == ["plain", "record", "replay"]  # a smaller one is no help


def test_a_size_that_was_run_plainly_is_recorded_for_a_smaller_one() -> None:
    recordings = Recordings(SIZES)
    assert [run(recordings, rows) for rows in (48, 40, 32, 24)] == [
        (48, "plain"), (48, "record"), (48, "replay"), (48, "replay"),
    ]  # fmt: skip


def test_a_batch_that_ends_hardly_runs_a_plain_step() -> None:
    """256 requests of which 8 end in every step: without stand-ins 29 of its steps are plain ones or recordings."""
    recordings = Recordings(SIZES)
    record(recordings, 256)
    how = Counter(run(recordings, rows)[1] for rows in range(256, 0, -8))
    assert how == {"replay": 26, "plain": 3, "record": 3}  # once for every halving of the rows


def test_a_size_that_stays_gets_a_recording_of_its_own() -> None:
    recordings = Recordings(SIZES)
    record(recordings, 256)
    found = [run(recordings, 140) for _ in range(PATIENCE + 3)]
    assert found == [(256, "replay")] * PATIENCE + [(144, "plain"), (144, "record"), (144, "replay")]


def test_after_the_warm_up_every_decode_step_is_replayed_or_recorded_once() -> None:
    """What a warm-up records stands in for all sizes, from the first request on; a size that stays is recorded."""
    recordings = Recordings(SIZES)
    for size in sizes_to_record(SIZES, Kind.PLAIN):
        recordings.of(size).graph = cast(Any, object())
    recordings.warm = True
    assert {run(recordings, rows)[1] for rows in range(1, 513)} <= {"replay", "record"}
    stays = Recordings(SIZES, warm=True)
    stays.of(256).graph = cast(Any, object())
    found = [run(stays, 140) for _ in range(PATIENCE + 2)]
    assert found == [(256, "replay")] * PATIENCE + [(144, "record"), (144, "replay")]


def test_the_nearest_recording_of_the_same_kind_stands_in_up_to_a_limit() -> None:
    recordings = Recordings(SIZES)
    for rows in (176, 256):
        record(recordings, rows)
    record(recordings, 128, traits=Traits(warm=True))
    record(recordings, 128, kind=Kind.SHARED)
    assert run(recordings, 129) == (176, "replay")
    assert run(recordings, 120) == (176, "replay")
    assert run(recordings, 176 // STRETCH - 8) == (80, "plain")
    assert run(recordings, 300) == (320, "plain")


def test_a_size_that_cannot_be_recorded_lends_nothing() -> None:
    recordings = Recordings(SIZES)
    size, recording = recordings.serve(256, PLAIN, False)
    assert size == 256 and recording == Recording()
    recording.refused = True
    assert run(recordings, 240) == (240, "plain")


def test_it_is_known_whether_anything_is_recorded() -> None:
    recordings = Recordings(SIZES)
    assert recordings.empty
    assert run(recordings, 8)[1] == "plain" and recordings.empty
    record(recordings, 8)
    assert not recordings.empty
