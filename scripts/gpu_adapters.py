"""What LoRA adapters cost a decode step: rows of which each has one of several, against the same rows of the base.

    python scripts/gpu_adapters.py                     # llama3-8b shape, 64 rows, 32 adapters of rank 16
    python scripts/gpu_adapters.py --device cpu --model default --rows 16 --adapters 8
    python scripts/gpu_adapters.py --device cpu --tiny                    # to see that it runs

Adapters are random, of the given rank, at every linear layer. All of it is one engine, in turns: the base's rows (with
recorded steps), the base's rows launched like those with adapters (a GPU does not record these), rows with adapters.
On a CPU what counts is the time of the process, on a GPU that of the wall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from h200_workloads import COMMON, SHAPES
from safetensors.torch import save_file

from tokenmill import LLM, LoRARequest, SamplingParams

LLAMA3_8B: dict[str, Any] = COMMON | SHAPES["llama3-8b"]
TINY = LLAMA3_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def write_adapter(folder: Path, llm: LLM, rank: int, seed: int) -> Path:
    """Random factors for all modules that the engine would take."""
    folder.mkdir()
    store = llm._built.engine.adapters
    assert store is not None
    make, tensors = torch.Generator().manual_seed(seed), {}
    for module, sections in store._base.modules.items():
        if len(sections) > 1:  # a fused spelling of others
            continue
        (section,) = sections
        rows, columns = section.last - section.first, store._base.columns[section.linear]
        at = f"base_model.model.{module}.lora_"
        tensors[f"{at}A.weight"] = (torch.randn(rank, columns, generator=make) / columns**0.5).bfloat16()
        tensors[f"{at}B.weight"] = (0.1 * torch.randn(rows, rank, generator=make)).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": None, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", help="another model than random weights of the shape of llama3-8b")
    parser.add_argument("--tiny", action="store_true", help="random weights of a tiny shape")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        options: dict[str, Any] = {"device": asked.device, "skip_tokenizer_init": True, "speculation": "off"}
        if asked.model is None:
            (folder / "config.json").write_text(json.dumps(TINY if asked.tiny else LLAMA3_8B))
            options["load_format"] = "dummy"
        length = asked.prompt + asked.tokens + 16
        options |= {"max_model_len": length, "max_num_seqs": asked.rows, "enable_prefix_caching": False}
        adapters = {"enable_lora": True, "max_loras": asked.adapters, "max_lora_rank": asked.rank}
        with LLM(asked.model or str(folder), **options, **adapters) as llm:
            for number in range(asked.adapters):
                llm.load_adapter(f"a{number}", write_adapter(folder / f"a{number}", llm, asked.rank, number))
            measure(llm, asked)


def measure(llm: LLM, asked: argparse.Namespace) -> None:
    prompts = [[3 + (7 * row + at) % 200 for at in range(asked.prompt)] for row in range(asked.rows)]
    mixed = [LoRARequest(f"a{row % asked.adapters}") for row in range(asked.rows)]
    half = [one if row % 2 else None for row, one in enumerate(mixed)]
    cases: dict[str, Any] = {"base": None, "adapters": mixed, "every other row": half}
    if asked.device == "cuda":
        cases["base, not recorded"] = None
    runner: Any = llm._built.engine.runner
    paths = list(runner.decode_paths)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(asked.turns + 1):  # the first warms up
        for name, requests in cases.items():
            runner.decode_paths[:] = [] if name == "base, not recorded" else paths
            seconds = {tokens: timed(llm, prompts, requests, tokens, asked.device) for tokens in (1, asked.tokens + 1)}
            if turn:
                found[name].append((seconds[asked.tokens + 1] - seconds[1]) / asked.tokens)
    base = statistics.median(found["base"])
    clock = "CPU" if asked.device == "cpu" else "wall"
    print(f"{asked.rows} rows, {asked.adapters} adapters of rank {asked.rank}, {clock} time of a decode step")
    for name, steps in found.items():
        ratios = [one / other for one, other in zip(steps, found["base"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        median = statistics.median(steps)
        print(f"  {name:20s} {1e3 * median:8.2f} ms   {median / base:.2f} x ({spread})")


def timed(llm: LLM, prompts: list[list[int]], requests: Any, tokens: int, device: str) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    llm.generate(prompts, params, False, lora_request=requests)
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


if __name__ == "__main__":
    main()
