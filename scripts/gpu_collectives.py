"""Checks and times what ranks with GPUs exchange: several of them on one GPU under MPS, or each with its own.

    python scripts/gpu_collectives.py [--ranks 2] [--own-gpus]

Ranks are processes. All verbs are compared with sums and copies made by torch, called and replayed from a CUDA graph.
Then all-reduces are timed in a graph of 50, one line per size: microseconds of one, least and median of 20 replays.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tokenmill.parallel.sums import sum_by_pairs
from tokenmill.parallel.symmetric import SymmetricCommunicator, start_group

IN_GRAPH, REPLAYS = 50, 20
SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20]
PATIENCE = 300  # seconds; ranks that wait for each other without MPS look as if they hung


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--own-gpus", action="store_true", help="rank i has GPU i; otherwise all have the first one")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        return be_rank(asked)
    with tempfile.TemporaryDirectory() as folder, mps(Path(folder), not asked.own_gpus) as environment:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--meeting", f"{folder}/meeting"],
                env=environment,
            )
            for rank in range(asked.ranks)
        ]
        try:
            ends = [rank.wait(timeout=PATIENCE) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(ends):
        raise SystemExit("a rank failed")


@contextmanager
def mps(folder: Path, wanted: bool) -> Iterator[dict[str, str]]:
    """The environment of processes that compute on one GPU at the same time."""
    environment = dict(os.environ)
    if not wanted:
        yield environment
        return
    for name in ("PIPE", "LOG"):
        (folder / name).mkdir()
        environment[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder / name)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    try:
        yield environment
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)


def be_rank(asked: argparse.Namespace) -> None:
    torch.cuda.set_device(asked.rank if asked.own_gpus else 0)
    group = start_group(asked.rank, asked.ranks, asked.meeting, share_one_gpu=not asked.own_gpus)
    nccl = None
    if asked.own_gpus:
        import torch.distributed as dist

        nccl = dist.new_group(backend="nccl")
    c = SymmetricCommunicator(group, nccl=nccl)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 3, 64, 700):
            check(c, rows, dtype, exact=asked.ranks == 2)
    check(SymmetricCommunicator(group, capacity=1 << 20, by_pairs=True), 700, torch.float32, exact=True)
    if c.rank == 0:
        print(f"all verbs are right for {asked.ranks} ranks", flush=True)
    for size in [] if asked.check_only else SIZES:
        time_sums(c, size)
    torch.cuda.synchronize()
    c.barrier()


def check(c: SymmetricCommunicator, rows: int, dtype: torch.dtype, exact: bool) -> None:
    parts = [
        torch.randn(c.size, rows, 1024, generator=torch.Generator().manual_seed(rank)).to("cuda", dtype)
        for rank in range(c.size)
    ]
    before, after = (c.rank - 1) % c.size, (c.rank + 1) % c.size
    own, sent = (
        parts[c.rank].clone(),
        parts[c.rank][0, :3].clone(),
    )  # what is sent has room: all send before they receive

    def all_verbs() -> list[torch.Tensor]:
        c.send(sent, after)
        return [c.all_reduce(own.clone()), c.all_gather(own), c.all_to_all(own), c.receive(sent, before)]

    total = sum_by_pairs(parts)
    expected = [total, torch.stack(parts), torch.stack([part[c.rank] for part in parts]), parts[before][0, :3]]
    compare(all_verbs(), expected, exact)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        all_verbs()  # compiles and allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = all_verbs()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    compare(found, expected, exact)


def compare(found: list[torch.Tensor], expected: list[torch.Tensor], exact: bool) -> None:
    torch.cuda.synchronize()
    torch.testing.assert_close(found[0], expected[0], **({"rtol": 0, "atol": 0} if exact else {}))
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(got, wanted)


def time_sums(c: SymmetricCommunicator, size: int) -> None:
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
    c.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            x = c.all_reduce(x)
    taken = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        c.barrier()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / IN_GRAPH * 1e6)
    if c.rank == 0:
        print(f"{size >> 10:6} KiB  least {min(taken):8.1f} us  median {statistics.median(taken):8.1f} us", flush=True)


if __name__ == "__main__":
    main()
