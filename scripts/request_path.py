"""Counts what one request passes through in tokenmill: files, functions and calls, offline and over HTTP.

    python scripts/request_path.py [--list] [--root DIR]
    python scripts/request_path.py --step-time DIR DIR ...

A tiny random model answers equal requests (4 tokens, greedy), traced with sys.setprofile; the first is a warm-up.
Counted is what every traced request passed (background work differs from one to the next), in files under tokenmill/
without ops, quant, model and sampling, which compute; comprehensions are part of the function that they stand in. A
generator or coroutine that goes on counts as a call. --root measures another checkout, with this Python.

Speculation is off unless --speculation is given: other versions have none.

--step-time compares checkouts in turns, without tracing: CPU time of a step in which 64 rows of the same model decode,
and of a request that reads 8 tokens for one. A model so small that the host's work is nearly all there is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

SKIPPED = ("ops", "quant", "model", "sampling")
PART = re.compile(r"<(listcomp|dictcomp|setcomp|genexpr)>$")  # functions in some versions of Python only
TIMES = 12
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Runs in every Python that starts with its folder on PYTHONPATH: one line per call, with the time that processes share.
HOOK = """
import os, sys, threading, time
out = os.open(f"{os.environ['REQUEST_PATH_TO']}/{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
root = os.environ["REQUEST_PATH_ROOT"] + os.sep
def seen(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root):
        os.write(out, f"{time.monotonic_ns()} {code.co_filename[len(root):]} {code.co_qualname}\\n".encode())
threading.setprofile(seen)
sys.setprofile(seen)
"""
OFFLINE = """
import sys, time
from tokenmill import LLM, SamplingParams
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
llm = LLM(model=sys.argv[1], load_format="dummy", device="cpu", skip_tokenizer_init=True, **options)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
for _ in range(int(sys.argv[2])):
    begun = time.monotonic_ns()
    llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params, use_tqdm=False)
    print(begun, time.monotonic_ns(), flush=True)
"""

STEP_TIME = """
import sys, time
from tokenmill import LLM, SamplingParams
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
llm = LLM(model=sys.argv[1], load_format="dummy", device="cpu", skip_tokenizer_init=True, max_num_seqs=64, **options)
def seconds(rows, length, tokens):
    prompts = [{"prompt_token_ids": [5 + row] * length} for row in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begun = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - begun
seconds(64, 4, 60)
decode = min(seconds(64, 4, 100) / 100 for _ in range(6))
prompt = min(sum(seconds(1, 8, 1) for _ in range(100)) / 100 for _ in range(6))
print(1e6 * decode, 1e6 * prompt)
"""

Call = tuple[int, str, str]  # when, file, function
Way = Callable[[str, dict[str, str], Path, list[str]], list[tuple[int, int]]]


def write_model(folder: Path) -> None:
    """Random weights, bytes as tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<|end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate([*special, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(TINY))


def offline(model: str, environment: dict[str, str], root: Path, without: list[str]) -> list[tuple[int, int]]:
    """Answers requests with LLM.generate; returns when each began and ended (monotonic nanoseconds)."""
    settings = [word for name in without for word in (name, "off")]
    command = [sys.executable, "-c", OFFLINE, model, str(TIMES), *settings]
    printed = subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [(int(begun), int(ended)) for begun, ended in (line.split() for line in printed.splitlines())]


def over_http(model: str, environment: dict[str, str], root: Path, without: list[str]) -> list[tuple[int, int]]:
    """The same of streamed chat completions, one connection each."""
    options = ["--port", "0", "--load-format", "dummy", "--device", "cpu", "--max-num-seqs", "16"]
    options += [word for name in without for word in (f"--{name}", "off")]
    command = [sys.executable, "-m", "tokenmill", "serve", model, *options]
    server = subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = next(filter(None, (re.match(r"tokenmill serves \S+ at (\S+)", line) for line in server.stderr)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        question = {"messages": [{"role": "user", "content": "mill"}], "max_tokens": 4, "temperature": 0}
        body = json.dumps(question | {"model": model, "stream": True, "ignore_eos": True}).encode()
        spans = []
        for _ in range(TIMES):
            time.sleep(0.5)  # for what follows an answer
            asked = urllib.request.Request(
                f"{found[1]}/v1/chat/completions", body, {"content-type": "application/json"}
            )
            begun = time.monotonic_ns()
            with urllib.request.urlopen(asked) as answer:
                assert b"[DONE]" in answer.read()
            spans.append((begun, time.monotonic_ns()))
        return spans
    finally:
        server.terminate()
        server.wait(60)


def traced(way: Way, root: Path, without: list[str]) -> tuple[list[tuple[str, str]], int]:
    """What every request but the first passed, in order of its first call; and the median number of calls."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        write_model(folder / "model")
        paths = {"PYTHONPATH": f"{folder / 'hook'}{os.pathsep}{root}", "REQUEST_PATH_TO": name}
        environment = os.environ | paths | {"REQUEST_PATH_ROOT": str(root / "tokenmill")}
        spans = way(str(folder / "model"), environment, root, without)[1:]
        lines = [line.split(" ", 2) for file in folder.glob("*.calls") for line in file.read_text().splitlines()]
    calls: list[Call] = sorted((int(when), file, function) for when, file, function in lines)
    calls = [call for call in calls if call[1].split("/")[0] not in SKIPPED and not PART.search(call[2])]
    requests = [[call for call in calls if begun <= call[0] <= ended] for begun, ended in spans]
    passed = set.intersection(*({(file, function) for _, file, function in request} for request in requests))
    order = dict.fromkeys((file, function) for _, file, function in requests[0] if (file, function) in passed)
    counts = [sum((file, function) in passed for _, file, function in request) for request in requests]
    return list(order), int(statistics.median(counts))


def step_times(roots: list[Path], speculation: bool, turns: int = 8) -> None:
    """Prints each checkout's least times over turns: whatever else the machine does only adds to them."""
    found: dict[Path, list[tuple[float, float]]] = {root: [] for root in roots}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        for _ in range(turns):
            for root in roots:
                settings = [word for name in switched_off(root, speculation) for word in (name, "off")]
                command = [sys.executable, "-c", STEP_TIME, str(Path(folder) / "model"), *settings]
                environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
                decode, prompt = map(float, done.stdout.split())
                found[root].append((decode, prompt))
    for root, times in found.items():
        decode, prompt = (min(column) for column in zip(*times, strict=True))
        print(f"{root}: {decode:.0f} us of CPU per step of 64 rows, {prompt:.0f} us per request of one step")


def switched_off(root: Path, speculation: bool) -> list[str]:
    """Settings of a checkout that are to be off."""
    known = "    speculation:" in (root / "tokenmill" / "config.py").read_text()
    return ["speculation"] if known and not speculation else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="the functions, too, in order of their first call")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--only", choices=["offline", "http"])
    parser.add_argument("--speculation", action="store_true")
    parser.add_argument("--step-time", type=Path, nargs="+", metavar="DIR", help="compare these checkouts")
    options = parser.parse_args()
    if options.step_time:
        step_times([root.resolve() for root in options.step_time], options.speculation)
        return
    root = options.root.resolve()
    without = switched_off(root, options.speculation)
    for name, way in (("offline", offline), ("http", over_http)):
        if options.only in (None, name):
            functions, calls = traced(way, root, without)
            print(f"{name}: {len({file for file, _ in functions})} files, {len(functions)} functions, {calls} calls")
            for file, function in functions if options.list else ():
                print(f"    {file}: {function}")


if __name__ == "__main__":
    main()
