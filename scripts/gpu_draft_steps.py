"""What a step that verifies drafts takes on a GPU beside a plain one, and which kernels its time goes to.

    python scripts/gpu_draft_steps.py smollm2-135m --rows 1 8 32 64 256 --drafts 1 2 4 8
    python scripts/gpu_draft_steps.py llama3-8b --rows 1 16 --drafts 4 8 --profile 1:8
    python scripts/gpu_draft_steps.py smollm2-135m --model default --rows 1 32 256 --drafts 1 4 --share

Random weights; steps are recorded, and replayed with rows of `--context` tokens each. Nothing is drafted: to propose
costs extra. Milliseconds are the device's (events around many replays), and the host's to launch such a step. With
`--model FILE` the model's own head drafts at the end of these steps, and `--drafts 16` verifies and grows trees.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from h200_workloads import COMMON, SHAPES

from tokenmill import LLM
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.engine.runner.recordings import Kind
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.step import DRAFTED, NODES, ON_DEVICE, ON_TREE, Step
from tokenmill.ops.triton import launch
from tokenmill.sampling.settings import Traits

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "head_dim": 64,
}  # fmt: skip
REPLAYS, LAUNCHES = 200, 100


def step_of(rows: int, drafts: int, context: int, trees: bool) -> Step:
    """Every row decodes behind so many tokens, and verifies so many drafts."""
    made = Step(1, tree=trees and drafts == NODES)
    count = 1 + (DRAFTED if made.tree else drafts)
    made.rows, made.starts, made.counts, made.samples = (
        list(range(rows)),
        [context] * rows,
        [count] * rows,
        [count] * rows,
    )
    made.num_singles = 0 if drafts else rows
    if drafts:
        made.drafts = {row: [ON_TREE if made.tree else ON_DEVICE] * (count - 1) for row in range(rows)}
        made.slack = dict.fromkeys(range(rows), 0)
    return made


class Steps:
    """Recorded steps of one engine."""

    def __init__(self, llm: LLM, context: int) -> None:
        runner = llm._built.engine.runner
        assert isinstance(runner, TorchRunner) and runner._graphs is not None
        self.graphs: DecodeGraphs = runner._graphs
        self.context, state = context, runner.state
        state.lengths.fill_(context + 1)
        per_row = -(-(context + 32) // state.block_size)
        blocks = torch.arange(len(state.tokens) * per_row, device=state.tokens.device) % state.num_blocks
        state.block_tables[:, :per_row] = blocks.view(len(state.tokens), per_row).int()

    def recorded(self, rows: int, drafts: int) -> tuple[Step, Kind, int]:
        step = step_of(rows, drafts, self.context, self.graphs.tree_drafter is not None)
        kind = self.graphs._kind_of(step, Traits())
        tokens = kind.kept * rows if kind.width > 1 else step.num_tokens
        size = self.graphs.recordings.next_size(tokens // kind.kept)
        for _ in range(2):
            with torch.inference_mode():
                self.graphs.rehearse(size, Traits(), kind)
        with torch.inference_mode():
            self.graphs.record_ahead(size, Traits(), kind)
            self.graphs._send(step, size, kind)
        return step, kind, size

    @torch.inference_mode()
    def device_ms(self, rows: int, drafts: int) -> float:
        _, kind, size = self.recorded(rows, drafts)
        graph = self.graphs.recordings.of(size, Traits(), kind).graph
        assert graph is not None
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS // 5):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / (REPLAYS // 5))
        return sorted(times)[2]

    def leave_drafting_out(self) -> None:
        """From now on steps are recorded anew, without what drafts at their end."""
        self.graphs.drafter = self.graphs.tree_drafter = None
        self.graphs.recordings._of.clear()

    @torch.inference_mode()
    def launch_ms(self, rows: int, drafts: int) -> float:
        step, _, _ = self.recorded(rows, drafts)
        took = []
        for _ in range(LAUNCHES):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.graphs.takes(step)
            self.graphs.run(step)
            took.append(time.perf_counter() - began)
        return 1e3 * sorted(took)[LAUNCHES // 2]

    @torch.inference_mode()
    def profile(self, rows: int, drafts: int, most: int) -> list[str]:
        """Kernels of one replay by name, those first that take most."""
        _, kind, size = self.recorded(rows, drafts)
        graph = self.graphs.recordings.of(size, Traits(), kind).graph
        assert graph is not None
        graph.replay()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as seen:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
        times, counts = Counter[str](), Counter[str]()
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name] += event.device_time_total / 3
                counts[event.name] += 1
        lines = [f"    {sum(times.values()):8.1f} us of {sum(counts.values()) // 3} kernels"]
        return lines + [f"    {us:8.1f} us {counts[name] // 3:4d} x {name:.90}" for name, us in times.most_common(most)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=["smollm2-135m", *SHAPES])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--profile", nargs="*", default=[], help="ROWS:DRAFTS")
    parser.add_argument("--kernels", type=int, default=14)
    parser.add_argument("--model", help="a file or folder, in place of random weights of the shape")
    parser.add_argument("--share", action="store_true", help="of drafting in these steps: time them without it, too")
    parser.add_argument("--apart", action="store_true", help="no kernel starts before the last has ended: times add up")
    arguments = parser.parse_args()
    if arguments.apart:
        launch.MOST_PROGRAMS = 0
    folder = Path(tempfile.gettempdir()) / "shapes" / arguments.shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | {"smollm2-135m": SMOLLM2, **SHAPES}[arguments.shape]))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "speculation": "suffix"}
    if arguments.model is not None:
        options = {"speculation": "on"}
    with LLM(model=arguments.model or str(folder), max_model_len=2048, **options) as llm:
        steps = Steps(llm, arguments.context)
        most = steps.graphs.recordings.sizes[-1]
        print(f"{'rows':>5} {'drafts':>6} {'device ms':>9} {'of plain':>8} {'launch ms':>9}")
        whole: dict[tuple[int, int], float] = {}
        for rows in arguments.rows:
            plain = steps.device_ms(rows, 0)
            for drafts in [0, *arguments.drafts]:
                if rows * (1 + drafts) <= most:
                    ms = steps.device_ms(rows, drafts) if drafts else plain
                    host, whole[rows, drafts] = steps.launch_ms(rows, drafts), ms
                    print(f"{rows:5d} {drafts:6d} {ms:9.3f} {ms / plain:8.2f} {host:9.3f}", flush=True)
        for one in arguments.profile:
            rows, drafts = map(int, one.split(":"))
            print(
                f"{rows} rows, {drafts} drafts", *steps.profile(rows, drafts, arguments.kernels), sep="\n", flush=True
            )
        if arguments.share:
            steps.leave_drafting_out()
            for (rows, drafts), ms in whole.items():
                if 0 < drafts < NODES:  # (Without a drafter there are no trees.)
                    without = steps.device_ms(rows, drafts)
                    said = f"{without:.3f} of {ms:.3f} ms without drafting"
                    print(f"{rows:5d} {drafts:6d} {said}, which takes {(ms - without) / ms:.1%}", flush=True)


if __name__ == "__main__":
    main()
