"""What a draft model, or a model's own first layers, bring on a GPU: tokens per second with and without, in turns.

    python scripts/gpu_draft_model.py --acceptance 0.8 --at 1 16
    python scripts/gpu_draft_model.py --model default --layers 8 22 --at 1 16

Without a model it is llama3-8b's shape and a draft model of so many layers, with random weights: which token follows a
token is as clear to both as in scripts/gpu_replay.py, but for a share of tokens that the draft model has wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_replay import make_steady
from h200_workloads import SHAPES

from tokenmill import LLM, SamplingParams
from tokenmill.model.decoder import Decoder

DRAFT = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}


def shape(name: str, config: dict[str, Any]) -> str:
    folder = Path(tempfile.gettempdir()) / "shapes" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@torch.inference_mode()
def mistake(decoder: Decoder, share: float) -> None:
    """Have the draft model say something else behind a share of all tokens."""
    weights = decoder.weights
    wrong = torch.rand(decoder.spec.vocab_size, generator=torch.Generator().manual_seed(1)) < share
    at = wrong.nonzero().flatten().to(weights.device)
    weights.embed[at] = weights.embed[at.roll(1)]  # type: ignore[index]


def compare(llm: LLM, at: int, prompt: int, tokens: int, turns: int, temperature: float) -> None:
    engine, vocab = llm._built.engine, llm._processor.vocab_size
    speculation = engine.speculation
    assert speculation is not None
    (stats,) = (one for name, one in speculation.stats.items() if name in ("draft", "layers"))
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=1, ignore_eos=True, detokenize=False)
    dice = random.Random(at)
    prompts = [{"prompt_token_ids": [dice.randrange(100, vocab - 1000) for _ in range(prompt)]} for _ in range(at)]

    def run(on: bool) -> tuple[float, int, list[list[int]]]:
        engine.speculation = speculation if on else None
        engine.scheduler.drafting = False
        llm.reset_prefix_cache()
        began, steps = time.perf_counter(), engine.scheduler.stats.steps
        outputs = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - began
        return taken, engine.scheduler.stats.steps - steps, [list(one.outputs[0].token_ids) for one in outputs]

    run(True)
    run(False)
    for _ in range(turns):
        drafted, accepted = stats.drafted, stats.accepted
        (plain, steps, expected), (taken, fewer, found) = run(False), run(True)
        same = sum(one == other for one, other in zip(expected, found, strict=True))
        print(
            f"{at:4d} at once: {at * tokens / plain:.0f} tokens/s, {at * tokens / taken:.0f} with drafts: "
            f"x {plain / taken:.2f}; ms per step {1e3 * plain / steps:.2f} and {1e3 * taken / fewer:.2f}; steps "
            f"x {steps / fewer:.2f}; held {stats.accepted - accepted} of {stats.drafted - drafted}; the same answer "
            f"{same} of {at}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--draft", help="a draft model for it")
    parser.add_argument("--layers", type=int, nargs="+", default=[], help="or so many of its own layers draft")
    parser.add_argument("--draft-layers", type=int, default=16, help="of the random draft model")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of its drafts")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 5 * max(arguments.at)}
    model, drafters = arguments.model, [f"layers:{count}" for count in arguments.layers]
    if arguments.draft:
        drafters.append(f"draft:{arguments.draft}")
    if model is None:
        target = SHAPES["llama3-8b"]
        model = shape("llama3-8b", target)
        config = target | DRAFT | {"num_hidden_layers": arguments.draft_layers}
        drafters = drafters or [f"draft:{shape(f'llama-draft-{arguments.draft_layers}', config)}"]
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    for drafter in drafters:
        began = time.perf_counter()
        with LLM(model=model, speculation=drafter, **options) as llm:
            print(f"{drafter}: ready after {time.perf_counter() - began:.1f} s", flush=True)
            runner = llm._built.engine.runner
            if arguments.model is None:
                make_steady(runner.decoder)
                if runner.beside is not None:
                    make_steady(runner.beside.decoder)
                    mistake(runner.beside.decoder, 1 - arguments.acceptance)
            for at in arguments.at:
                compare(llm, at, arguments.input, arguments.output, arguments.turns, arguments.temperature)
            from tokenmill.ops.triton.launch import FIRST_LAUNCHES

            print(f"kernels compiled since it was ready: {FIRST_LAUNCHES.count}", flush=True)


if __name__ == "__main__":
    main()
