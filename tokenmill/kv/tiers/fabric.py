"""Fabric: memory of one engine read by another without its help, over NIXL (shared memory, TCP, RDMA)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import secrets
import threading
import time
from typing import Any

from tokenmill import peers
from tokenmill.errors import ConfigError
from tokenmill.kv.tiers.wire import PeerError

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")  # by the release of CUDA that it was built for
PAUSE = 2e-5  # seconds between two looks at a transfer


class StillCopying(Exception):
    """A read was given up and could not be cancelled: its target may still be written to."""


class NixlFabric:
    """An agent of this process.

    Blocks are always read by whoever keeps them, never written by whoever has them: the one that gives out a place
    knows when nobody writes to it any more.

    Thread-safe; what is read is not checked here.
    """

    def __init__(self) -> None:
        api = _api()
        # Whoever comes back under the same name would be taken for who was there before.
        self._agent: Any = api.nixl_agent(f"tokenmill-{secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))
        self._memory: list[Any] = []
        self._lock = threading.Lock()

    def register(self, memory: memoryview) -> None:
        """Others may read it, or what is read goes there; before anybody is met."""
        self._memory.append(self._agent.register_memory([(address_of(memory), len(memory), 0, "")], "DRAM"))

    def describe(self) -> bytes:
        """What a peer has to know to read from here."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def meet(self, described: bytes) -> bytes:
        """A peer that has proven who it is; what it is called from now on."""
        with self._lock:
            try:
                found: bytes = self._agent.add_remote_agent(described)
            except Exception as error:
                raise PeerError(f"the peer's description makes no sense to NIXL: {error}") from None
            return found

    def part(self, peer: bytes) -> None:
        with self._lock, contextlib.suppress(Exception):  # it may be gone already
            self._agent.remove_remote_agent(peer)

    def read(self, peer: bytes, address: int, target: memoryview) -> None:
        """Copy from the peer's memory; returns when it is done, or raises and nothing is written any more."""
        with self._lock:
            handle = None
            try:
                here = self._agent.get_xfer_descs([(address_of(target), len(target), 0)], "DRAM")
                there = self._agent.get_xfer_descs([(address, len(target), 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, peer)
                state, late = self._agent.transfer(handle), time.monotonic() + peers.FRAME_SECONDS
                while state == "PROC" and time.monotonic() < late:
                    time.sleep(PAUSE)
                    state = self._agent.check_xfer_state(handle)
            except Exception as error:
                raise PeerError(f"NIXL: {error}") from None
            finally:
                if handle is not None:
                    self._release(handle)
        if state != "DONE":
            raise PeerError("the peer's memory cannot be read any more")

    def close(self) -> None:
        with self._lock:
            for memory in self._memory:
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(memory)
            self._memory.clear()

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise StillCopying(str(error)) from None


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _api() -> Any:
    for name in MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise ConfigError(
        "kv_transport is 'nixl', which is not installed; pip install nixl-cu12 (or -cu13), or leave it out"
    )
