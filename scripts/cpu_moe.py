"""A mixture of experts on a CPU: decoding and prompts with experts in each form, in turns, in CPU time of one thread.

    python scripts/cpu_moe.py --turns 5
    python scripts/cpu_moe.py --before DIR     # a checkout of another version, which takes turns with this one

The model has random weights and the shape of a small Qwen3-MoE. Beside the time of a step stands what reading its
active weights would take at the measured bandwidth of one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "head_dim": 64,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FORMS = {"floats (bf16)": None, "int8": "int8", "int4": "int4"}
ROWS, PROMPT, SHORT, LONG = (1, 16), 512, 4, 28
READ_ALL = 4  # src/matrix.h


def serve(folder: str, quantization: str | None) -> None:
    """Measures what it is told on its standard input: a kind of step, in CPU milliseconds of one."""
    import torch

    from tokenmill import LLM, SamplingParams

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=16, quantization=quantization,
        max_model_len=1024, max_num_batched_tokens=PROMPT, speculation="off", kv_cache_memory=1 << 28,
    )  # fmt: skip
    calls = 0

    def generate(rows: int, tokens: int, length: int) -> float:
        nonlocal calls
        calls += 1
        prompts = [
            [(calls * 7919 + row * 31 + place * 53) % 16000 + 5 for place in range(length)] for row in range(rows)
        ]
        began = time.process_time()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return time.process_time() - began

    def measured(rows: int) -> float:
        if not rows:
            return generate(1, 1, PROMPT)
        return (generate(rows, LONG, 8) - generate(rows, SHORT, 8)) / (LONG - SHORT)

    print(json.dumps([line for line in llm.plan_lines() if line.startswith("linear")]), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(1000 * measured(json.loads(line))), file=answers, flush=True)


def bandwidth() -> float:
    """Bytes per second that one thread reads from memory."""
    import torch

    from tokenmill.ops.native.library import library

    class CeilingArgs(ctypes.Structure):
        _fields_ = [(name, ctypes.c_void_p if name in ("data", "sink") else ctypes.c_int64)
                    for name in ("data", "bytes", "repeats", "sink")]  # fmt: skip

    native, memory, sink = library(), torch.ones(1 << 29, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64)
    native.threads = 1
    args, best = CeilingArgs(memory.data_ptr(), len(memory), 1, sink.data_ptr()), 0.0
    for _ in range(5):
        began = time.process_time()
        native.run(READ_ALL, args)
        best = max(best, len(memory) / (time.process_time() - began))
    return best


def active_bytes(folder: str, quantization: str | None, rows: int) -> float:
    """Of the weights that a step with so many rows reads, if they choose their experts at random."""
    import torch

    from tokenmill.config import EngineConfig
    from tokenmill.engine.choices import matrix_bytes, matrix_shapes
    from tokenmill.model.families import spec_from_config
    from tokenmill.quant.forms import parse_layout
    from tokenmill.quant.schemes.choose import ComputeTarget, choose_schemes

    spec = spec_from_config(json.loads(Path(EngineConfig(model=folder).model, "config.json").read_text()))
    assert spec.moe is not None
    place = ComputeTarget(torch.device("cpu"), torch.float32, native=True)
    schemes = choose_schemes(parse_layout(quantization), matrix_shapes(spec), {}, False, place)
    chosen = 1 - (1 - spec.moe.top_k / spec.moe.experts) ** rows
    held = matrix_bytes(spec, torch.float32, schemes, None)
    routers = sum(param.numel * 4 for param in spec.parameters().values() if param.kind == "router")
    return routers + sum(size * (chosen if ".experts_" in name else 1) for name, size in held.items())


class Engine:
    """A process that holds one variant."""

    def __init__(self, folder: str, quantization: str | None, package: str) -> None:
        environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", json.dumps([folder, quantization])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=package
        )
        self.lines = self._read()

    def ask(self, rows: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps(rows), file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--before", help="a checkout of another version")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(*json.loads(given.serve))
    here, kinds = str(Path(__file__).parents[1]), (*ROWS, 0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        engines = {name: Engine(folder, form, here) for name, form in FORMS.items()}
        if given.before:
            engines = {"before": Engine(folder, None, given.before)} | engines
        times: dict[tuple[str, int], list[float]] = {}
        for turn in range(given.turns + 1):
            for name, engine in engines.items():
                for rows in kinds:
                    found = engine.ask(rows)
                    if turn:  # the first records
                        times.setdefault((name, rows), []).append(found)
        for engine in engines.values():
            engine.close()
        first, speed = next(iter(engines)), bandwidth()
        print(f"one thread reads {speed / 1e9:.1f} GB/s; CPU ms of a step, least of {given.turns} turns")
        times_of, bounds_of = "1 row | 16 rows | prompt of 512", "bytes bound: 1 row | 16 rows"
        print(f"| experts | {times_of} | of the first: 1 row | 16 rows | prompt | {bounds_of} |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for name in engines:
            least = [min(times[name, rows]) for rows in kinds]
            ratios = [statistics.median(a / b for a, b in zip(times[first, rows], times[name, rows])) for rows in kinds]
            bounds = ["-", "-"]
            if name in FORMS:
                reading = [1000 * active_bytes(folder, FORMS[name], rows) / speed for rows in ROWS]
                bounds = [f"{bound:.2f} ms ({bound / time:.0%})" for bound, time in zip(reading, least)]
            cells = [name, *(f"{one:.2f}" for one in least), *(f"{one:.2f} x" for one in ratios), *bounds]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
