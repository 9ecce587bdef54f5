"""Times the all-reduce of ranks that are processes of this machine, beside gloo's in the same rounds.

    python scripts/collectives.py [--ranks 2] [--bytes 65536] [--rounds 15] [--without-gloo]

Every rank has one thread. A round has calls from Python, calls in a recorded graph of 100, calls over connections as
between machines (TCP, here of one machine to itself, so without a network's time), and gloo's, in turns. Shown
are the least and the median microseconds of a call over the rounds, and the median of gloo's time over ours, round by
round. Other programs on the machine make all of it slower, most what waits without sleeping: look at the least.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tokenmill.ops.native import library
from tokenmill.ops.native.recording import RecordedGraph
from tokenmill.parallel.channel import Channel
from tokenmill.parallel.compressed import compressed_all_reduce
from tokenmill.parallel.segment import Segment
from tokenmill.parallel.shared_memory import SharedMemoryCommunicator
from tokenmill.parallel.sockets import Channels, SocketCommunicator

IN_GRAPH, CALLS, SLOW_CALLS = 100, 400, 100
RECORDED, DIRECT, POLLING, GLOO = "in a recorded graph", "called from Python", "without the native library", "gloo"
COMPRESSED = "called, in eight bits"
SOCKETS = "over connections"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=[16 << 10, 64 << 10, 256 << 10, 2 << 20])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-gloo", action="store_true")
    asked = parser.parse_args()
    found = library.load()  # built here, once
    if isinstance(found, str):
        raise SystemExit(found)
    found.threads = 1
    segment = Segment.create([range(asked.ranks)], slot_bytes=512 << 10)
    ends = connections(asked.ranks)
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=be_rank, args=(rank, segment.name, asked, Path(folder) / "gloo", ends[rank]))
            for rank in range(asked.ranks)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit("a rank failed")


def connections(ranks: int) -> list[dict[int, tuple[socket.socket, bytes]]]:
    """Of each rank, by the rank at the other end."""
    ends: list[dict[int, tuple[socket.socket, bytes]]] = [{} for _ in range(ranks)]
    with socket.create_server(("127.0.0.1", 0)) as door:
        for low in range(ranks):
            for high in range(low + 1, ranks):
                key = secrets.token_bytes(32)
                ends[high][low] = socket.create_connection(door.getsockname()), key
                ends[low][high] = door.accept()[0], key
    return ends


def be_rank(
    rank: int,
    name: str,
    asked: argparse.Namespace,
    meeting: Path,
    ends: dict[int, tuple[socket.socket, bytes]],
) -> None:
    torch.set_num_threads(1)
    segment = Segment.open(name, rank)
    native = SharedMemoryCommunicator(segment, rank, native=True)
    polling = SharedMemoryCommunicator(other_segment(native, segment, asked.ranks, rank), rank, native=False)
    links = {other: Channel(end, key, rank < other) for other, (end, key) in ends.items()}
    far = SocketCommunicator(Channels(links, lambda: segment.ended, segment.abort), rank, range(asked.ranks), 0)
    if not asked.without_gloo:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=asked.ranks)
    for size in asked.bytes:
        x = torch.zeros(size // 4)
        graph = RecordedGraph(1)
        with graph.record():
            for _ in range(IN_GRAPH):
                native.all_reduce(x.view(1, -1))
        ways: dict[str, Callable[[], float]] = {
            RECORDED: lambda graph=graph: per_call(lambda: graph.run(1), CALLS // IN_GRAPH) / IN_GRAPH,
            DIRECT: lambda x=x: per_call(lambda: native.all_reduce(x), CALLS),
            COMPRESSED: lambda x=x: per_call(lambda: compressed_all_reduce(native, x), SLOW_CALLS),
            SOCKETS: lambda x=x: per_call(lambda: far.all_reduce(x), SLOW_CALLS),
            POLLING: lambda x=x: per_call(lambda: polling.all_reduce(x), SLOW_CALLS),
        }
        if not asked.without_gloo:
            ways[GLOO] = lambda x=x: per_call(lambda: dist.all_reduce(x), SLOW_CALLS)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(asked.rounds):
            for way, timed in ways.items():
                native.barrier()
                times[way].append(timed())
        if rank == 0:
            tell(size, asked, times)
        native.barrier()


def other_segment(c: SharedMemoryCommunicator, first: Segment, ranks: int, rank: int) -> Segment:
    """Made by rank 0, which tells the others its name."""
    if rank == 0:
        made = Segment.create(first.groups)
        c.all_gather(torch.tensor(list(made.name.encode().ljust(200))))
        made.enter(0)
        return made
    name = c.all_gather(torch.zeros(200, dtype=torch.int64))[0]
    return Segment.open(bytes(name.tolist()).decode().strip(), rank)


def per_call(call: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def tell(size: int, asked: argparse.Namespace, times: dict[str, list[float]]) -> None:
    print(f"{size >> 10} KiB between {asked.ranks} ranks, {asked.rounds} rounds")
    for way, taken in times.items():
        line = f"  {way:28} least {min(taken):8.1f} us   median {statistics.median(taken):8.1f} us"
        if GLOO in times and way != GLOO:
            ratio = statistics.median(theirs / ours for theirs, ours in zip(times[GLOO], taken, strict=True))
            line += f"   gloo takes {ratio:5.1f} times that"
        print(line, flush=True)


if __name__ == "__main__":
    main()
