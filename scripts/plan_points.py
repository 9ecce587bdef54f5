"""Compares the planner's predictions with this machine: step times, batches of requests, memory. Ends with a JSON line.

    python scripts/plan_points.py                                   # the default model, here
    python scripts/plan_points.py --shape llama3-8b                 # a public model's shape, random weights
    python scripts/plan_points.py --threads 1 --cpu-time            # where others use the same cores

The roofline is fitted to the calibration's own steps (`tokenmill plan` does the same) and then asked about other
steps, and about whole batches, which it has not seen. On a known GPU the shipped figures are asked as well.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.planner.calibrate import CPU_START, GPU_START, built_element_bytes, fit_steps
from tokenmill.plan.planner.probe import CPU_POINTS, GPU_POINTS, Probe, StepPoint, Timed
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.simulate import simulate
from tokenmill.plan.solve.gpus import EFFICIENCIES, rates_of, recognize
from tokenmill.plan.solve.roofline import Roofline
from tokenmill.plan.solve.settings import SolvedSettings

CPU_CHECKS = (
    StepPoint(1, 256), StepPoint(2, 128), StepPoint(6, 512), StepPoint(12, 64), StepPoint(24, 128),
    StepPoint(40, 384), StepPoint(56, 200), StepPoint(chunk=32), StepPoint(chunk=128), StepPoint(chunk=384),
    StepPoint(chunk=192, start=512), StepPoint(8, 128, 64), StepPoint(32, 128, 256),
)  # fmt: skip
GPU_CHECKS = (
    StepPoint(1, 1000), StepPoint(4, 2000), StepPoint(16, 1000), StepPoint(64, 500), StepPoint(64, 2000),
    StepPoint(192, 400), StepPoint(256, 2000), StepPoint(chunk=256), StepPoint(chunk=1024), StepPoint(chunk=4096),
    StepPoint(chunk=2048, start=4000), StepPoint(32, 512, 512), StepPoint(128, 1000, 2048),
)  # fmt: skip
CPU_BATCHES = {"1 x 64+32": [(64, 32)], "8 x 96+24": [(96, 24)] * 8, "24 of 16-128 in, 8-32 out": 24}
GPU_BATCHES = {"1 x 128+128": [(128, 128)], "64 x 1024+128": [(1024, 128)] * 64, "16 x 4096+1": [(4096, 1)] * 16,
               "192 of 100-1024 in, 50-256 out": 192}  # fmt: skip


def main() -> None:
    arguments = _arguments()
    import torch

    from tokenmill import LLM

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    before = _resident(on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            _shape_folder(arguments.shape, Path(folder)) if arguments.shape else arguments.model,
            device=arguments.device,
            load_format="dummy" if arguments.shape else "auto",
            quantization=arguments.quantization,
            kv_cache_dtype=arguments.kv_cache_dtype,
            skip_tokenizer_init=True,
            max_model_len=8192 if on_gpu else 2048,
            max_num_seqs=257 if on_gpu else 65,
            **({} if on_gpu else {"kv_cache_memory": 1 << 30}),
        )
    built, settings = llm._built, llm._built.settings
    runner: Any = built.engine.runner
    runner.state.arena.fill_(0)  # so that it is really there
    here = _resident(on_gpu) - before
    print(f"{built.files.name}, {runner.device}, torch {torch.__version__}", flush=True)

    probe = Probe(built, clock)
    batches = {name: _requests(work) for name, work in (GPU_BATCHES if on_gpu else CPU_BATCHES).items()}
    _generate(llm, [(40, 4)] * 3, clock)
    took = {name: min(_generate(llm, work, clock) for _ in range(2)) for name, work in batches.items()}
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    print("batches, seconds:", json.dumps(took), flush=True)
    seen = _measure(probe, GPU_POINTS if on_gpu else CPU_POINTS, arguments.budget)
    fresh = _measure(probe, GPU_CHECKS if on_gpu else CPU_CHECKS, arguments.budget)

    element_bytes, _ = built_element_bytes(built, probe.shape)
    fitted = fit_steps(probe.shape, element_bytes, seen, GPU_START if on_gpu else CPU_START)
    models = {"fitted": Roofline(probe.shape, element_bytes, fitted.rates)}
    known = recognize(torch.cuda.get_device_name()) if on_gpu else None
    kind = arguments.quantization or "dense"
    if known is not None and kind in EFFICIENCIES:
        models["shipped"] = Roofline(probe.shape, element_bytes, rates_of(known, kind))
    print(f"fit of {len(seen)} steps: worst {fitted.worst:.1%}\n{fitted.rates}", flush=True)

    rows: list[dict[str, Any]] = []
    for one in seen:
        rows.append({"what": "fitted step", "name": one.point.name, "measured": one.seconds}
                    | {name: cost.seconds(one.point.facts(probe.shape)) for name, cost in models.items()})  # fmt: skip
    for one in fresh:
        rows.append({"what": "step", "name": one.point.name, "measured": one.seconds}
                    | {name: cost.seconds(one.point.facts(probe.shape)) for name, cost in models.items()})  # fmt: skip
    for name, work in batches.items():
        rows.append({"what": "batch", "name": name, "measured": took[name]}
                    | {which: _simulated(cost, work, settings, on_gpu) for which, cost in models.items()})  # fmt: skip
    plan = settings.memory
    tables = 4 * (settings.max_rows + 1) * (settings.max_len + settings.max_len // settings.block_size)
    rows.append(
        {"what": "memory", "name": "weights, kv cache and tables", "measured": here,
         "fitted": plan.weights + plan.kv + tables}
    )  # fmt: skip
    if on_gpu:
        rows.append({"what": "memory", "name": "peak (planned: at most)", "measured": peak, "fitted": plan.total})
    _print(rows)
    print(json.dumps({"model": built.files.name, "device": str(runner.device), "rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--shape", help="a name of scripts/h200_workloads.py")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="time of the process; with --threads 1")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per point")
    return parser.parse_args()


def _shape_folder(name: str, folder: Path) -> str:
    from h200_workloads import COMMON, SHAPES

    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[name]))
    return str(folder)


def _measure(probe: Probe, points: tuple[StepPoint, ...], budget: float) -> list[Timed]:
    """One by one, and told at once: a run that is cut short keeps what it has."""
    found = []
    for point in filter(probe.fits, points):
        found.append(probe.time(point, budget))
        print(f"{point.name:34} {found[-1].seconds * 1e3:9.2f} ms", flush=True)
    return found


def _requests(work: int | list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Fixed requests, or so many with lengths from a seed: the larger kind where a count is large."""
    if isinstance(work, list):
        return work
    source, large = random.Random(7), work > 100
    first, last = ((100, 1024), (50, 256)) if large else ((16, 128), (8, 32))
    return [(source.randint(*first), source.randint(*last)) for _ in range(work)]


def _generate(llm: Any, work: list[tuple[int, int]], clock: Any) -> float:
    from tokenmill import SamplingParams

    source = random.Random(time.perf_counter_ns())  # never the same twice: nothing is found in the cache
    vocab = llm._processor.vocab_size
    prompts = [[source.randrange(vocab) for _ in range(prompt)] for prompt, _ in work]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=out, detokenize=False) for _, out in work]
    began = clock()
    llm.generate(prompts, params, use_tqdm=False)
    return float(clock() - began)


def _simulated(model: Roofline, work: list[tuple[int, int]], settings: SolvedSettings, overlap: bool) -> float:
    """Seconds of the batch on the real scheduler, with steps that take what the model says."""
    tokens = settings.num_blocks * settings.block_size
    machine = Machine("here", model, 1, tokens, 1, settings.max_rows, settings.max_step_tokens, overlap)
    prompts, outputs = zip(*work)
    batch = Workload("batch", (0.0,) * len(work), prompts, outputs)
    return simulate(ClusterSpec(ReplicaSpec(machine, settings.block_size)), batch).seconds


def _resident(on_gpu: bool) -> int:
    if on_gpu:
        import torch

        return int(torch.cuda.memory_allocated())
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS:")).split()[1]) * 1024


def _print(rows: list[dict[str, Any]]) -> None:
    names = [name for name in ("fitted", "shipped") if any(name in row for row in rows)]
    print(f"{'':12} {'':34} {'measured':>12} " + " ".join(f"{name:>12} {'off':>7}" for name in names))
    for row in rows:
        bytes_ = row["what"] == "memory"
        shown = [f"{row['measured'] / 2**20:9.0f} MiB" if bytes_ else f"{row['measured'] * 1e3:9.2f} ms"]
        for name in names:
            if name in row:
                value = f"{row[name] / 2**20:9.0f} MiB" if bytes_ else f"{row[name] * 1e3:9.2f} ms"
                shown.append(f"{value:>12} {row[name] / row['measured'] - 1:+7.1%}")
        print(f"{row['what']:12} {row['name']:34} " + " ".join(shown), flush=True)


if __name__ == "__main__":
    main()
