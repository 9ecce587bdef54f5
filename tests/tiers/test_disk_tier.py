"""The disk tier on bad disks: what is torn, flipped, cut or another's is a miss, and never an answer."""

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_memory import SIZE, SPACE, BadFiles, FakeMemory, ended, get, name, put, summed

from tokenmill.errors import ConfigError
from tokenmill.kv.tiers.disk import open_disk
from tokenmill.kv.tiers.files import PAGE
from tokenmill.kv.tiers.queued import ThreadBell

RECORD = PAGE + 2 * PAGE


def disk(path, memory, size=20 * RECORD, space=SPACE, files=None):
    tier = open_disk(str(path), size, space, memory, summed, ThreadBell(), files)
    assert tier.wait_until_scanned(20)
    return tier


@pytest.fixture
def memory():
    return FakeMemory()


def test_what_was_written_is_read_and_outlives_the_engine(tmp_path, memory):
    tier = disk(tmp_path, memory)
    assert put(tier, memory, range(8), "salt").arrived == 8
    assert tier.lookup([name(number) for number in (0, 1, 7, 99)]) == 3
    assert get(tier, memory, range(8)).arrived == 8
    tier.close()
    again = disk(tmp_path, memory)
    assert get(again, memory, range(8)).arrived == 8
    again.slots.check()
    again.forget("salt")
    assert again.lookup([name(0)]) == 0
    again.close()
    third = disk(tmp_path, memory)
    assert third.lookup([name(0)]) == 0, "what was forgotten came back"
    third.close()


def test_only_the_owner_may_read_and_names_say_nothing(tmp_path, memory):
    tier = disk(tmp_path, memory)
    put(tier, memory, range(3))
    tier.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3  # key, lock, segment
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert all(SPACE.digest.hex() not in str(path) and name(1).hex() not in str(path) for path in files)


def test_a_full_disk_takes_no_more_and_serves_what_it_has(tmp_path, memory, caplog):
    files = BadFiles(room=0)
    tier = disk(tmp_path, memory, files=files)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert put(tier, memory, range(4)).arrived == 0
    assert sum("is full" in record.message for record in caplog.records) == 1
    assert tier.lookup([name(0)]) == 0 and get(tier, memory, range(4)).arrived == 0
    tier.close()


def test_errors_of_the_disk_cost_blocks_and_nothing_else(tmp_path, memory):
    files = BadFiles()
    tier = disk(tmp_path, memory, files=files)
    put(tier, memory, range(4))
    files.fail_reads = True
    assert get(tier, memory, range(4)).failure
    assert tier.lookup([name(0)]) == 0 and tier.lookup([name(1)]) == 1
    files.fail_reads, files.fail_writes = False, True
    for number in range(10, 30):
        assert put(tier, memory, [number]).arrived == 0
    assert files.writes < 20, "a disk that fails at every write is left alone"
    files.fail_writes = False
    assert get(tier, memory, range(1, 4)).arrived == 3
    tier.slots.check()
    tier.close()


@pytest.mark.parametrize("where", [0, 20, 70, 79, PAGE, PAGE + SIZE // 2, PAGE + SIZE - 1])
def test_a_flipped_bit_is_a_miss(tmp_path, memory, where):
    tier = disk(tmp_path, memory)
    put(tier, memory, range(4))
    (segment,) = tmp_path.rglob("segment-*")

    def flip():
        with segment.open("r+b") as file:
            file.seek(RECORD + where)
            byte = file.read(1)
            file.seek(RECORD + where)
            file.write(bytes([byte[0] ^ 4]))
            file.flush()
            os.fsync(file.fileno())

    flip()
    done = get(tier, memory, range(4))
    assert done.arrived == 1 and "damaged" in done.failure
    tier.close()
    again = disk(tmp_path, memory)
    held = [number for number in range(4) if again.lookup([name(number)])]
    assert {0, 2, 3} <= set(held)
    for number in held:
        get(again, memory, [number])
    again.close()


@pytest.mark.parametrize("length", [0, 100, RECORD, RECORD + PAGE, 2 * RECORD + PAGE + 10])
def test_a_cut_segment_keeps_what_is_left(tmp_path, memory, length):
    tier = disk(tmp_path, memory)
    put(tier, memory, range(4))
    tier.close()
    (segment,) = tmp_path.rglob("segment-*")
    os.truncate(segment, length)
    again = disk(tmp_path, memory)
    whole = length // RECORD
    assert again.lookup([name(number) for number in range(4)]) >= whole
    assert get(again, memory, range(4)).arrived == whole
    again.slots.check()
    assert put(again, memory, range(40, 44)).arrived == 4 and get(again, memory, range(40, 44)).arrived == 4
    again.close()


def test_half_a_write_is_a_miss_also_over_an_older_block(tmp_path, memory):
    files = BadFiles()
    tier = disk(tmp_path, memory, size=2 * RECORD, files=files)
    put(tier, memory, [1, 2])
    files.halve_writes = True
    put(tier, memory, [3])
    tier.close()
    again = disk(tmp_path, memory, size=2 * RECORD)
    assert get(again, memory, [3]).arrived == 0
    assert get(again, memory, [2]).arrived == 1
    again.close()


def test_another_models_blocks_are_never_found(tmp_path, memory):
    tier = disk(tmp_path, memory)
    put(tier, memory, range(4))
    tier.close()
    other = replace(SPACE, weights="others")
    stranger = disk(tmp_path, memory, space=other)
    assert stranger.lookup([name(0)]) == 0
    (mine,) = tmp_path.rglob("segment-*")
    assert mine.parent != stranger.folder
    target = stranger.folder / mine.name
    stranger.close()
    target.write_bytes(mine.read_bytes())  # and even a copy of them is not
    stranger = disk(tmp_path, memory, space=other)
    assert stranger.lookup([name(0)]) == 0
    stranger.close()


def test_two_engines_have_a_part_each_and_the_first_comes_back_to_its_own(tmp_path, memory):
    first, second = disk(tmp_path, memory), disk(tmp_path, memory)
    assert first.folder != second.folder
    put(first, memory, [1])
    assert second.lookup([name(1)]) == 0
    first.close()
    third = disk(tmp_path, memory)
    assert third.folder == first.folder and get(third, memory, [1]).arrived == 1
    second.close()
    third.close()


def test_a_folder_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, memory):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="nothing can be kept"):
        disk(tmp_path / "file", memory)
    with pytest.raises(ConfigError, match="kv_disk_bytes is 100"):
        disk(tmp_path / "small", memory, size=100)


def test_a_tenant_cannot_fill_the_disk(tmp_path, memory):
    tier = disk(tmp_path, memory, size=20 * RECORD)
    put(tier, memory, range(6), "quiet")
    for start in range(100, 200, 20):
        put(tier, memory, range(start, start + 20), "loud")
    assert tier.lookup([name(number) for number in range(6)]) == 6
    tier.slots.check()
    tier.close()


def test_what_is_leased_stays(tmp_path, memory):
    tier = disk(tmp_path, memory, size=8 * RECORD)
    put(tier, memory, range(4))
    assert tier.lease([name(0), name(1), name(50)], 100.0) == 2
    for start in range(100, 200, 8):
        put(tier, memory, range(start, start + 8))
    assert tier.lookup([name(0), name(1)]) == 2 and tier.lookup([name(2)]) == 0
    tier.close()


WRITER = """
import sys, itertools
sys.path[:0] = {paths!r}
from pathlib import Path
from fake_memory import FakeMemory
from test_disk_tier import disk, put
memory = FakeMemory()
tier = disk(Path(sys.argv[1]), memory)
for start in itertools.count(0, 4):
    put(tier, memory, range(start, start + 4))
    print(start, flush=True)
"""


def test_kill_9_in_the_middle_of_writes_loses_at_most_those(tmp_path, memory):
    script = WRITER.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[2])])
    for wait in (0.0, 0.01, 0.03):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(6):
            told = int(process.stdout.readline())
        time.sleep(wait)
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        last = int(rest[-1]) if rest else told
        tier = disk(tmp_path, memory)
        for number in range(max(0, last - 8), last + 8):
            get(tier, memory, [number])  # compares
        held = [number for number in range(last + 4) if tier.lookup([name(number)])]
        assert len(held) >= 14, "of 20 slots all are whole but those that were being written"
        tier.close()


def test_a_block_that_is_withdrawn_while_it_is_written_is_not_kept(tmp_path, memory):
    tier = disk(tmp_path, memory)
    memory.go.clear()
    ticket = tier.write([name(1)], [memory.fill(0, 1)], "")
    tier.discard([name(1)])
    memory.go.set()
    ended(tier, ticket)
    assert tier.lookup([name(1)]) == 0
    tier.close()
    again = disk(tmp_path, memory)
    assert again.lookup([name(1)]) == 0
    again.close()
