"""What a GPU engine's first minute is like: seconds to ready, first runs against second ones, kernels met too late.

    TOKENMILL_CACHE=$(mktemp -d) python scripts/gpu_ready.py llama3-8b      # nothing compiled yet
    python scripts/gpu_ready.py llama3-8b                                   # and with everything kept

Weights are random, prompts are token ids. "late" counts launches after ready that had to wait for a kernel to be
compiled or loaded: it is to be 0.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from h200_workloads import SHAPES, Work, fixed, mixed, shared  # noqa: E402

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip
MORE = {
    "qwen2.5-7b": QWEN25 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "llama3.2-1b": SHAPES["llama3-8b"] | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
LOADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "1 x (128 + 64)": (lambda: fixed(1, 128, 64, 3), {}),
    "64 x (1k + 64)": (lambda: fixed(64, 1024, 64, 4), {}),
    "16 x 4k": (lambda: fixed(16, 4096, 1, 5), {}),
    "mix of 64": (lambda: [(prompt, 1 + answer // 4) for prompt, answer in mixed(64)], {}),
    "256 share 2k": (lambda: shared(256), {}),
    "8 x (512 + 64), sampled": (lambda: fixed(8, 512, 64, 6), SAMPLED),
    "32 x (2k + 64), sampled": (lambda: fixed(32, 2048, 64, 7), SAMPLED),
    "64 x (256 + 128), plain at 0.7": (lambda: fixed(64, 256, 128, 8), {"temperature": 0.7}),
    "64 x (256 + 128), logprobs 5": (lambda: fixed(64, 256, 128, 8), {"temperature": 0.7, "logprobs": 5}),
    "64 x (256 + 128), penalties": (
        lambda: fixed(64, 256, 128, 8),
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    ),
    "8 x (300 + 32), n = 4": (lambda: fixed(8, 300, 32, 9), {"temperature": 1.0, "n": 4}),
    "4 x (300 + 16), bias and min_tokens": (
        lambda: fixed(4, 300, 16, 9), {"temperature": 0.0, "logit_bias": {5: 2.0}, "min_tokens": 4},
    ),
    "held out: 8 x (512 + 256), sampled": (lambda: fixed(8, 512, 256, 6), SAMPLED),
    "held out: 32 x (2k + 256), sampled": (lambda: fixed(32, 2048, 256, 7), SAMPLED),
    "held out: 32 x (2k + 256), greedy": (lambda: fixed(32, 2048, 256, 7), {}),
    "3 x (700 + 8), prompt_logprobs": (lambda: fixed(3, 700, 8, 10), {"temperature": 0.0, "prompt_logprobs": 2}),
}  # fmt: skip


class Stages:
    """When each part of the start ended, as the engine tells of it."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def __call__(self, done: int, total: int, what: str) -> None:
        self._ends[what] = time.time()

    def __str__(self) -> str:
        begins = [BEGAN, *self._ends.values()]
        return ", ".join(f"{what} {end - begin:.1f} s" for begin, (what, end) in zip(begins, self._ends.items()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=[*SHAPES, *MORE])
    parser.add_argument("--quantization")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--skip-loads", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="what each kernel took")
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(format="%(relativeCreated)7d %(message)s")
        logging.getLogger("tokenmill.kernels").setLevel(logging.DEBUG)
    stages = Stages()
    import torch

    stages(1, 1, "importing torch")
    torch.cuda.init()
    stages(1, 1, "initializing CUDA")
    from tokenmill import LLM, SamplingParams

    stages(1, 1, "importing tokenmill")
    folder = Path(tempfile.gettempdir()) / "shapes" / arguments.shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps((SHAPES | MORE)[arguments.shape]))
    options: dict[str, Any] = {"quantization": arguments.quantization} if arguments.quantization else {}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192, "max_num_seqs": 512}
    llm = LLM(model=str(folder), progress=stages, **options)
    stages(1, 1, "the rest")
    print(f"{arguments.shape} {arguments.quantization or 'bf16'}: ready after {time.time() - BEGAN:.1f} s", flush=True)
    print("of which    ", stages, flush=True)
    print(*(line for line in llm.plan_lines() if line.startswith(("kernels", "passed"))), sep="\n", flush=True)
    from tokenmill.ops.triton.launch import FIRST_LAUNCHES

    def run(work: Work, changes: dict[str, Any]) -> float:
        usual = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**{**usual, **changes}, max_tokens=answer) for _, answer in work]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False)
        return time.perf_counter() - began

    for name, (make, changes) in LOADS.items():
        if arguments.skip_loads or (arguments.only and not any(word in name for word in arguments.only)):
            continue
        before, work = FIRST_LAUNCHES.count, make()
        first, second, third = (run(work, changes) for _ in range(3))
        late = FIRST_LAUNCHES.count - before
        print(f"{name:38s} first {first:7.3f} s, then {second:7.3f} {third:7.3f}   late {late}", flush=True)


if __name__ == "__main__":
    main()
