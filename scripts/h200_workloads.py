"""Runs the offline workloads of docs/performance.md on public models' shapes, with random weights.

    python scripts/h200_workloads.py llama3-8b
    python scripts/h200_workloads.py llama3-8b --quantization fp8 --only single batch64

Greedy, end tokens ignored, prompts as token ids; a workload is timed from submit to last token, the best of `--repeat`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

Work = list[tuple[list[int], int]]  # (prompt ids, tokens to generate)

COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "head_dim": 128, "dtype": "bfloat16"}
SHAPES = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 151645,
    },
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 5e5, "tie_word_embeddings": False, "eos_token_id": 128001,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 151645,
    },
}  # fmt: skip


def ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(1000, 100_000) for _ in range(count)]


def fixed(count: int, prompt: int, answer: int, seed: int) -> Work:
    source = random.Random(seed)
    return [(ids(source, prompt), answer) for _ in range(count)]


def mixed(count: int, seed: int = 0) -> Work:
    source = random.Random(seed)
    return [(ids(source, source.randint(100, 1024)), source.randint(100, 1024)) for _ in range(count)]


def shared(count: int, seed: int = 2) -> Work:
    source = random.Random(seed)
    prefix = ids(source, 2048)
    return [(prefix + ids(source, 64), 64) for _ in range(count)]


WORKLOADS: dict[str, Callable[[], Work]] = {
    "single": lambda: fixed(1, 128, 256, 3),
    "batch64": lambda: fixed(64, 1024, 256, 4),
    "prefill": lambda: fixed(16, 4096, 1, 5),
    "mix": lambda: mixed(256),
    "offline512": lambda: fixed(512, 1024, 512, 6),
    "shared": lambda: shared(256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--only", nargs="*", choices=WORKLOADS)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    began = time.perf_counter()
    from tokenmill import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | SHAPES[arguments.shape]))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=512,
            quantization=arguments.quantization, kv_cache_dtype=arguments.kv_cache_dtype,
        )  # fmt: skip

    def run(work: Work) -> float:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False) for _, answer in work
        ]
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
        took = time.perf_counter() - start
        assert [len(one.outputs[0].token_ids) for one in outputs] == [answer for _, answer in work]
        return took

    run(fixed(8, 100, 16, 9))
    print(f"{arguments.shape} {arguments.quantization or ''}: first answers after {time.perf_counter() - began:.1f} s")
    for name in arguments.only or WORKLOADS:
        times = []
        for _ in range(arguments.repeat):
            llm.reset_prefix_cache()
            work = WORKLOADS[name]()
            times.append(run(work))
        generated, read = sum(answer for _, answer in work), sum(len(prompt) for prompt, _ in work)
        best = min(times)
        print(f"{name:12s} {best:8.3f} s  {generated / best:10.1f} out tok/s  {(generated + read) / best:10.1f} tok/s")


if __name__ == "__main__":
    main()
