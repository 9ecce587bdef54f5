"""A proxy for rehearsals that lets the network through slowly, cuts it after some seconds, and mends it on SIGUSR1."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

CHUNK = 1 << 16


class Network:
    """Bytes that went through, and whether any may."""

    def __init__(self, seconds: float, rate: float) -> None:
        self._seconds, self._rate = seconds, rate
        self._began: float | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.before = self.after = 0  # bytes that came from servers: until the cut, and since it was mended
        self.mended = False

    @property
    def cut(self) -> bool:
        return not self.mended and self._began is not None and time.monotonic() - self._began > self._seconds

    async def pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, counted: bool) -> None:
        self._open.add(target)
        with contextlib.suppress(ConnectionError, OSError):
            while (chunk := await source.read(CHUNK)) and not self.cut:
                self._began = self._began or time.monotonic()
                target.write(chunk)
                await target.drain()
                if counted:
                    await self._count(len(chunk))
        self._open.discard(target)
        target.close()

    async def _count(self, size: int) -> None:
        if self.mended:
            self.after += size
        else:
            self.before += size
            await asyncio.sleep(size / self._rate)

    async def watch(self) -> None:
        """Drop what is open when the time has come; nobody is told, as when a cable is pulled and put back."""
        while not self.cut:
            await asyncio.sleep(0.02)
        for writer in list(self._open):
            writer.transport.abort()


async def serve(network: Network, port_file: Path) -> None:
    upstream = urlsplit(os.environ.get("REHEARSAL_PROXY") or "")

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, address, _ = head.split(b" ", 2)
            if method != b"CONNECT" or network.cut:
                raise ConnectionError
            host, _, port = address.decode().rpartition(":")
            far, near = await asyncio.open_connection(upstream.hostname or host, upstream.port or int(port))
            if upstream.hostname:
                near.write(head)
                await far.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, ValueError):
            writer.transport.abort()
            return
        await asyncio.gather(network.pass_on(reader, near, False), network.pass_on(far, writer, True))

    server = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(network, "mended", True))
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    port_file.write_text(str(server.sockets[0].getsockname()[1]))
    watching = loop.create_task(network.watch())
    await stop.wait()
    watching.cancel()
    print(f"{network.before / 1e6:.1f} MB came before the cut, {network.after / 1e6:.1f} MB afterwards")
    os._exit(0)  # tunnels that are still open do not matter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port_file", type=Path, help="the port is written here")
    parser.add_argument("--seconds", type=float, default=5, help="from the first byte to the cut")
    parser.add_argument("--rate", type=float, default=8e6, help="bytes per second of each connection until then")
    given = parser.parse_args()
    asyncio.run(serve(Network(given.seconds, given.rate), given.port_file))


if __name__ == "__main__":
    main()
