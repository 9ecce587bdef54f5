"""A scaled-down trace against real servers on this machine, apart and together, and the same in the simulator.

    python scripts/split_trace.py mooncake_conversation_trace.jsonl --conversations 16 --scale 32 --rate 2

Asked are the first conversations of three turns or more. Lengths are divided by `--scale`, and so are the blocks that
prompts have in common: what could be cached is what the trace says.
Each layout gets the whole trace on servers that have just started:
  cache-aware  two servers that read and answer, behind `tokenmill route`
  round-robin  the same behind another policy
  split        one that reads prompts and pushes their keys and values, and one that answers
First tokens and gaps are this machine's (relative to each other); cached and computed tokens are counts. Needs httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.demand.traces import read_trace
from tokenmill.plan.demand.workload import Workload, percentile
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.machines import Machine, machine_named
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.simulate import prompt_tokens, simulate

LAYOUTS = ("cache-aware", "round-robin", "split")
LOOKED_AT = 3000  # requests of the trace among which conversations are found
LEAST_TURNS = 3
VOCAB = 250  # ids that prompts are made of: fewer than any model has
PATIENCE = 300.0  # seconds
CPU = ("--device", "cpu", "--speculation", "off", "--max-model-len", "2048", "--max-num-seqs", "16")
KV_TOKENS = 40_000


@dataclass
class Answer:
    asked: float
    tokens: list[float] = field(default_factory=list)  # when each was heard

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.tokens, self.tokens[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--scale", type=int, default=32, help="by which lengths are divided; divides 512")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--model", default="default")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds that are promised for a first token")
    parser.add_argument("--itl", type=float, default=0.2, help="and for the gaps behind it")
    args = parser.parse_args()
    workload = scaled(conversations(read_trace(args.trace, LOOKED_AT), args.conversations), args.scale)
    workload = workload.at_rate(args.rate)
    slo = Slo(ttft=args.ttft, itl=args.itl)
    prompts = sum(workload.prompts)
    print(f"{len(workload)} requests, {prompts:,} prompt tokens, {sum(workload.outputs):,} to be answered")
    print(f"{'':24}{'good/s':>8}{'ttft p50':>10}{'p95':>8}{'gap p50':>9}{'p95':>8}{'computed':>10}{'cached':>9}")
    for layout in args.layouts:
        with started(layout, args.model, args.load_format) as (router, servers):
            answers, seconds = asyncio.run(ask(router, workload))
            computed = sum(counter(one, "prefilled_tokens_total") for one in servers)
        show(f"{layout}, run", answers, seconds, slo, computed, prompts)
        simulated(layout, workload, slo, prompts)


def conversations(workload: Workload, count: int) -> Workload:
    """Requests whose prompts begin alike, beyond what all of them have in common."""
    assert workload.hash_ids is not None
    by_beginning: dict[tuple[int, ...], list[int]] = {}
    for number, ids in enumerate(workload.hash_ids):
        if len(ids) > 1:
            by_beginning.setdefault(ids[:2], []).append(number)
    long = [numbers for numbers in by_beginning.values() if len(numbers) >= LEAST_TURNS][:count]
    chosen = sorted(number for numbers in long for number in numbers)
    first = workload.arrivals[chosen[0]]
    return workload.select(chosen, [workload.arrivals[number] - first for number in chosen])


def scaled(workload: Workload, by: int) -> Workload:
    return replace(
        workload,
        prompts=tuple(max(2, one // by) for one in workload.prompts),
        outputs=tuple(max(2, one // by) for one in workload.outputs),
        hash_block=workload.hash_block // by,
    )


def simulated(layout: str, workload: Workload, slo: Slo, prompts: int) -> None:
    machine = replace(machine_named("cpu-135m"), kv_tokens=KV_TOKENS, max_rows=16)
    # Two servers share the cores of this machine: each step takes as long as on half of them.
    slow: Machine = replace(machine, step_time=_slower(machine, 2.0))
    router = {"split": "least-loaded"}.get(layout, layout)
    spec = ClusterSpec(
        ReplicaSpec(slow, block_size=16), replicas=2, router=router, prefill=int(layout == "split"), link_bytes=5e8
    )
    found = simulate(spec, workload)
    figures = found.figures(slo)
    cached = round(figures["cached_share"] * prompts)
    line(
        f"{layout}, simulated",
        found.goodput(slo),
        (figures["ttft_p50"], figures["ttft_p95"], figures["itl_p50"], figures["itl_p95"]),
        prompts - cached,
        prompts,
    )


def _slower(machine: Machine, times: float):  # type: ignore[no-untyped-def]
    prices = machine.step_time
    return replace(prices, **{name: times * price for name, price in vars(prices).items()})  # type: ignore[type-var]


@contextlib.contextmanager
def started(layout: str, model: str, load_format: str) -> Iterator[tuple[str, list[str]]]:
    """The router's address, and those of the servers."""
    folder = tempfile.TemporaryDirectory()
    secret, push = Path(folder.name) / "secret", free_port()
    secret.write_text("known to these servers and to nobody else")
    options = (model, "--load-format", load_format, *CPU, "--kv-cache-memory", str(KV_TOKENS * 46_080))
    known = ("--kv-secret-file", str(secret))
    ports, processes = [free_port(), free_port()], []
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    more = [(), ()]
    routes = [word for url in urls for word in ("--replica", url)]
    if layout == "split":
        more = [
            ("--kv-push-to", f"127.0.0.1:{push}", *known),
            ("--kv-host-memory", str(2 << 30), "--kv-listen", f"127.0.0.1:{push}", *known),
        ]
        routes = ["--replica", urls[1], "--prefill", f"{urls[0]}={urls[1]}", "--prefill-tokens", "32"]
    elif layout == "round-robin":
        routes += ["--policy", "round-robin"]
    front = free_port()
    try:
        for port, words in zip(ports, more, strict=True):
            processes.append(start("serve", *options, *words, "--port", str(port)))
        processes.append(start("route", *routes, "--port", str(front)))
        wait_for([*urls, f"http://127.0.0.1:{front}"], processes)
        yield f"http://127.0.0.1:{front}", urls
    finally:
        for one in processes:
            one.terminate()
        for one in processes:
            one.wait(60)
        folder.cleanup()


def start(*words: str) -> subprocess.Popen[bytes]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "tokenmill", *words], **quiet)  # type: ignore[call-overload,no-any-return]


def wait_for(urls: list[str], processes: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + PATIENCE
    for url in urls:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            ended = [one.args for one in processes if one.poll() is not None]
            if ended or time.monotonic() > until:
                raise SystemExit(f"{url} did not get ready; ended: {ended}")
            time.sleep(0.2)


async def ask(url: str, workload: Workload) -> tuple[list[Answer], float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as http:
        began = time.monotonic()

        async def one(number: int) -> Answer:
            await asyncio.sleep(max(0.0, began + workload.arrivals[number] - time.monotonic()))
            tokens = [
                3 + (token * 2654435761 + at * 40503 >> 7) % (VOCAB - 3)  # other tokens where the trace has others
                for at, token in enumerate(prompt_tokens(workload, number))
            ]
            body = {"prompt": tokens, "max_tokens": workload.outputs[number], "ignore_eos": True, "temperature": 0}
            body |= {"stream": True, "return_token_ids": True}
            answer = Answer(time.monotonic())
            async with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
                async for text in reply.aiter_lines():
                    if text.startswith("data: {"):
                        ids = json.loads(text[6:])["choices"][0].get("token_ids") or []
                        answer.tokens += [time.monotonic()] * len(ids)
            if len(answer.tokens) != workload.outputs[number]:
                raise SystemExit(f"request {number} got {len(answer.tokens)} of {workload.outputs[number]} tokens")
            return answer

        return list(await asyncio.gather(*map(one, range(len(workload))))), time.monotonic() - began


def show(name: str, answers: list[Answer], seconds: float, slo: Slo, computed: int, prompts: int) -> None:
    ttfts, gaps = [one.tokens[0] - one.asked for one in answers], [gap for one in answers for gap in one.gaps]
    good = sum(
        one.tokens[0] - one.asked <= slo.ttft and sum(gap <= slo.itl for gap in one.gaps) >= slo.share * len(one.gaps)
        for one in answers
    )
    times = percentile(ttfts, 0.5), percentile(ttfts, 0.95), percentile(gaps, 0.5), percentile(gaps, 0.95)
    line(name, good / seconds, times, computed, prompts)


def line(name: str, good: float, times: tuple[float, float, float, float], computed: int, prompts: int) -> None:
    first, late, gap, long = times
    print(
        f"{name:24}{good:8.2f}{first:10.2f}{late:8.2f}{1e3 * gap:7.0f}ms{1e3 * long:6.0f}ms{computed:10,}"
        f"{1 - computed / prompts:9.1%}",
        flush=True,
    )


def counter(url: str, name: str) -> int:
    time.sleep(1.5)  # a server tells of itself every now and then
    found = re.findall(rf"^tokenmill_{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    return round(sum(map(float, found)))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    main()
