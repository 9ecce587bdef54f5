"""Decoding by ranks that divide a model, with a core each, against one rank with all cores: in turns, in two processes.

    python scripts/cpu_ranks.py tp2 --threads 2 --turns 8

The model has the shape of Qwen2.5-0.5B and random weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def serve(pipe: Connection, folder: str, threads: int, options: dict[str, Any]) -> None:
    """An engine that generates whenever it is told, and says how many tokens per second that were."""
    import torch

    from tokenmill import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=16, **options)
    pipe.send([line for line in llm.plan_lines() if line.startswith(("ranks", "linear", "native"))])
    while (told := pipe.recv()) is not None:
        rows, count = told
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        prompts = [[7 + row, 8, 9, 10] for row in range(rows)]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        pipe.send(rows * count / (time.perf_counter() - begin))
    llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parallel", nargs="?", default="tp2")
    parser.add_argument("--threads", type=int, default=2, help="of one rank; several ranks divide them")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--quantization")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        context = multiprocessing.get_context("spawn")
        engines = {}
        for name, parallel in (("one rank", None), (given.parallel, given.parallel)):
            ours, theirs = context.Pipe()
            options = {"parallel": parallel, "quantization": given.quantization, "speculation": None}
            process = context.Process(target=serve, args=(theirs, folder, given.threads, options))
            process.start()
            engines[name] = ours
            print(name, *ours.recv(), sep="\n  ", flush=True)
        for rows in given.rows:
            found: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(given.turns + 1):
                for name, pipe in engines.items():
                    pipe.send((rows, given.tokens))
                    speed = pipe.recv()
                    if turn:  # the first one records
                        found[name].append(speed)
            first, second = found.values()
            ratios = [b / a for a, b in zip(first, second, strict=True)]
            middle = ", ".join(f"{name} {statistics.median(speeds):.1f} tokens/s" for name, speeds in found.items())
            print(
                f"{rows} rows: {middle}; ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        for pipe in engines.values():
            pipe.send(None)


if __name__ == "__main__":
    main()
