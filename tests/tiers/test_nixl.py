"""Blocks that another engine reads out of a prefill worker's memory over NIXL; skipped where that is not installed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_memory import SIZE, SPACE, FakeMemory, get, name, put, summed
from test_remote_tier import SECRET, settle

from tokenmill.errors import ConfigError
from tokenmill.kv.tiers import fabric as fabric_module
from tokenmill.kv.tiers.fabric import NixlFabric
from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.listener import TierListener
from tokenmill.kv.tiers.queued import ThreadBell
from tokenmill.kv.tiers.remote import RemoteTier


@pytest.fixture
def fabrics(monkeypatch):
    """As many as are asked for; over the loopback, so that no machine's network matters."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")

    def one():
        try:
            return NixlFabric()
        except ConfigError as missing:
            pytest.skip(str(missing))

    return one


def side_with(fabric):
    memory = FakeMemory()
    host = HostTier(memory, 64 * SIZE, summed, ThreadBell())
    return host, TierListener(host, ("127.0.0.1", 0), SECRET, SPACE.digest, fabric)


def test_without_it_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fabric_module, "MODULES", ("no_such_module",))
    with pytest.raises(ConfigError, match="pip install nixl"):
        NixlFabric()


def test_what_is_offered_is_read(fabrics):
    host, listener = side_with(fabrics())
    tier = RemoteTier(listener.address, SECRET, SPACE.digest, FakeMemory(), summed, ThreadBell(), fabric=fabrics())
    assert put(tier, tier.memory, range(20), "salt").arrived == 20 and tier._offers
    assert get(host, host.memory, range(20)).arrived == 20
    assert get(tier, tier.memory, range(20)).arrived == 20
    host.slots.check()
    tier.close()
    listener.close()
    host.close()


def test_a_wrong_checksum_is_never_kept(fabrics):
    host, listener = side_with(fabrics())
    wrong = lambda data: summed(data) ^ 1  # noqa: E731
    tier = RemoteTier(listener.address, SECRET, SPACE.digest, FakeMemory(), wrong, ThreadBell(), fabric=fabrics())
    assert put(tier, tier.memory, range(4)).arrived == 0
    assert not host.lookup([name(0)])
    host.slots.check()
    tier.close()
    listener.close()
    host.close()


PUSHER = """
import sys, itertools
sys.path[:0] = {paths!r}
from fake_memory import FakeMemory, put, summed, SPACE
from tokenmill.kv.tiers.fabric import NixlFabric
from tokenmill.kv.tiers.remote import RemoteTier
from tokenmill.kv.tiers.queued import ThreadBell
tier = RemoteTier(
    ("127.0.0.1", {port}), b"k" * 32, SPACE.digest, FakeMemory(), summed, ThreadBell(), fabric=NixlFabric()
)
for start in itertools.count(int(sys.argv[1]), 8):
    assert put(tier, tier.memory, range(start, start + 8)).failure is None
    print("pushed", start, file=sys.stderr, flush=True)
"""


def test_a_pusher_killed_at_any_moment_leaves_only_whole_blocks(fabrics, monkeypatch):
    monkeypatch.setattr("tokenmill.kv.tiers.listener.PUT_SECONDS", 0.0)
    host, listener = side_with(fabrics())
    paths = [*sys.path, str(Path(__file__).parent), str(Path(__file__).parents[2])]
    script = PUSHER.format(paths=paths, port=listener.address[1])
    for turn, wait in enumerate((0.0, 0.007)):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(turn * 10_000)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        seen = 0
        while seen < 3:
            seen += process.stderr.readline().startswith("pushed")
        time.sleep(wait)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        settle(type("Side", (), {"listener": listener}))
        held = [number for number in range(turn * 10_000, turn * 10_000 + 4000) if host.lookup([name(number)])]
        assert len(held) >= 16
        for number in held:
            assert get(host, host.memory, [number]).arrived == 1  # compares
        host.slots.check()
    listener.close()
    host.close()
