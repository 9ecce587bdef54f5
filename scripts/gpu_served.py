"""A served 7B shape under open load: TTFT, gaps and end-to-end times of the first 60 requests and the 300 after them.

    python scripts/gpu_served.py                                  # 8, 24 and 40 requests/s, one draw each
    python scripts/gpu_served.py --rates 40 --draws 4             # the same rate, four different loads
    python scripts/gpu_served.py --tree ../before --rates 24,40   # the server of another checkout, the same requests

Qwen2.5-7B's body with a vocabulary of 32,000, random weights, Poisson arrivals, prompts of about 1,024 and answers of
about 128 tokens. Times count from the moment a request was due. The client needs nothing but Python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": 31999,
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
PORT = 8765
FIRST = 60


@dataclass
class Answer:
    """When one request was due and when each of its events came."""

    due: float
    events: list[float] = field(default_factory=list)


def make_model() -> Path:
    """A folder with the shape and a tokenizer of words w0, w1, ...; the weights are made up at load."""
    folder = Path(tempfile.gettempdir()) / "shapes" / "qwen2.5-7b-32k"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {f"w{index}": index for index in range(CONFIG["vocab_size"])}  # type: ignore[call-overload]
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model,
    }))  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w31999"}))
    return folder


def start(tree: Path, options: list[str]) -> tuple[subprocess.Popen[bytes], float]:
    """The server of `tree`, and the seconds until /health said that it was ready."""
    command = [sys.executable, "-m", "tokenmill", "serve", str(make_model()), "--load-format", "dummy"]
    command += ["--port", str(PORT), "--max-model-len", "8192", "--log-level", "warning", *options]
    began = time.monotonic()
    server = subprocess.Popen(command, cwd=tree, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    while time.monotonic() - began < 300 and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as reply:
                if reply.status == 200:
                    return server, time.monotonic() - began
        except OSError:
            time.sleep(0.05)
    server.kill()
    raise SystemExit("the server did not come up; its own words are above")


async def ask(prompt: list[int], max_tokens: int, due: float) -> Answer:
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    answer = Answer(due)
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    body = json.dumps({
        "model": "qwen2.5-7b-32k", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True,
        "temperature": 0,
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            answer.events.append(time.monotonic())
    writer.close()
    if len(answer.events) < max_tokens:
        raise SystemExit(f"an answer of {max_tokens} tokens came in {len(answer.events)} events")
    return answer


async def load(rate: float, draw: int, count: int) -> list[Answer]:
    chance = random.Random(1000 * draw + round(rate))
    due, asked = time.monotonic() + 0.2, []
    for _ in range(count):
        due += chance.expovariate(rate)
        prompt = [chance.randrange(31999) for _ in range(max(16, round(chance.gauss(1024, 200))))]
        asked.append(asyncio.create_task(ask(prompt, max(8, round(chance.gauss(128, 30))), due)))
    return await asyncio.gather(*asked)


def percentiles(values: list[float], *points: float) -> str:
    ranked = sorted(values)
    return " / ".join(f"{ranked[min(len(ranked) - 1, int(point / 100 * len(ranked)))]:.1f}" for point in points)


def report(name: str, answers: list[Answer]) -> None:
    first = [1000 * (one.events[0] - one.due) for one in answers]
    gaps = [1000 * (b - a) for one in answers for a, b in zip(one.events, one.events[1:], strict=False)]
    whole = [one.events[-1] - one.due for one in answers]
    print(
        f"{name:22s} TTFT ms {percentiles(first, 50, 90, 99)}   gaps ms {percentiles(gaps, 50, 90, 99, 99.9)}   "
        f"end to end s {percentiles(whole, 50, 99)} mean {sum(whole) / len(whole):.3f}",
        flush=True,
    )


def late_kernels() -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return next((line.split()[-1] for line in lines if line.startswith("tokenmill_kernels_compiled_after")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="8,24,40")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--requests", type=int, default=360)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the checkout that serves")
    parser.add_argument("options", nargs="*", help="more options of `tokenmill serve`, after --")
    arguments = parser.parse_args()
    server, seconds = start(arguments.tree, arguments.options)
    try:
        print(f"ready after {seconds:.1f} s", flush=True)
        for rate in map(float, arguments.rates.split(",")):
            for draw in range(arguments.draws):
                answers = asyncio.run(load(rate, draw, arguments.requests))
                if not draw:
                    report(f"{rate:g}/s first {FIRST}", answers[:FIRST])
                report(f"{rate:g}/s draw {draw} then", answers[FIRST:])
        print(f"kernels compiled after ready: {late_kernels()}", flush=True)
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
