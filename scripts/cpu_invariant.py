"""What `batch_invariant` costs on a CPU: CPU time of decode steps and of prompts' tokens, off and on in turns.

python scripts/cpu_invariant.py [--model MODEL] [--requests 1 16] [--prompt 400] [--tokens 60] [--turns 4]
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from tokenmill import LLM, SamplingParams


class Timed:
    """An engine that notes the CPU time of every step, by its number of tokens."""

    def __init__(self, model: str, requests: int, **options: Any) -> None:
        self.llm = LLM(
            model, device="cpu", max_num_seqs=requests, max_model_len=2048, kv_cache_memory=600 << 20,
            speculation="off", enable_prefix_caching=False, skip_tokenizer_init=True, **options,
        )  # fmt: skip
        self.steps: list[tuple[int, float]] = []
        runner = self.llm._built.engine.runner
        launch = runner.launch

        def timed(step: Any) -> Any:
            begin = time.process_time()
            pending = launch(step)  # a CPU computes a step while launching it
            self.steps.append((sum(step.counts), time.process_time() - begin))
            return pending

        runner.launch = timed

    def least(self, few: bool, requests: int) -> float:
        """Seconds of the cheapest decode step, or per token of the cheapest step that mostly reads prompts."""
        if few:
            return min(seconds for tokens, seconds in self.steps if tokens == requests)
        return min(seconds / tokens for tokens, seconds in self.steps if tokens >= 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=400, help="tokens of each prompt, at least 256")
    parser.add_argument("--tokens", type=int, default=60, help="of each answer")
    parser.add_argument("--turns", type=int, default=4)
    chosen = parser.parse_args()
    draw = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=chosen.tokens, ignore_eos=True, detokenize=False)
    for requests in chosen.requests:
        engines = [Timed(chosen.model, requests, batch_invariant=on) for on in (False, True)]
        vocab = engines[0].llm._built.spec.vocab_size
        prompts = [[draw.randrange(3, vocab) for _ in range(chosen.prompt)] for _ in range(requests)]
        for turn in range(chosen.turns + 1):
            for one in engines:
                one.llm.generate(prompts, params, use_tqdm=False)
                if turn == 0:  # steps are recorded now
                    one.steps.clear()
        off, on = ((one.least(True, requests) * 1e3, one.least(False, requests) * 1e6) for one in engines)
        print(
            f"{requests} request{'s' * (requests > 1)}: decode step {off[0]:.2f} ms off, {on[0]:.2f} ms on "
            f"({on[0] / off[0] - 1:+.1%}); prompt {off[1]:.0f} us per token off, {on[1]:.0f} us on "
            f"({on[1] / off[1] - 1:+.1%}); CPU time, least of {chosen.turns} turns"
        )
        for one in engines:
            one.llm.shutdown()


if __name__ == "__main__":
    main()
