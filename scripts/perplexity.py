"""Perplexity of a model on a text, computed in two ways: what quantized arithmetic costs in quality.

    python scripts/perplexity.py wikitext2_raw_test.txt --tokens 20000

compares the engine as it chooses itself (--candidate) with its plain torch ops (--reference). Both take settings of
EngineConfig as NAME=VALUE: what a quantized KV cache costs is seen with

    python scripts/perplexity.py TEXT --reference kv_cache_dtype=float32 --candidate kv_cache_dtype=int8

The text is cut into windows that are read one by one, each from its own beginning.
The change comes with its standard error, of the differences token by token: rounding alone moves single tokens a little
up and down, so a change within two errors of zero is none that was seen.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams


def main() -> None:
    arguments = parse()
    results = {}
    for side in ("reference", "candidate"):
        options = dict(map(setting, getattr(arguments, side)))
        with LLM(arguments.model, device="cpu", max_num_seqs=8, max_model_len=arguments.window + 1, **options) as llm:
            print(f"{side}: {options or 'as solved'}", *llm.plan_lines(), sep="\n  ", flush=True)
            results[side] = losses(llm, windows(llm, arguments))
    before, after = (results[side] for side in ("reference", "candidate"))
    worse = [new - old for new, old in zip(after, before, strict=True)]
    change, error = math.expm1(statistics.fmean(worse)), statistics.stdev(worse) / math.sqrt(len(worse))
    print(
        f"perplexity: reference {perplexity(before):.4f}, candidate {perplexity(after):.4f}, "
        f"{change:+.3%} (standard error {error:.3%})"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=20_000, help="how much of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--reference", nargs="*", default=["ops=reference"], metavar="NAME=VALUE")
    parser.add_argument("--candidate", nargs="*", default=[], metavar="NAME=VALUE")
    return parser.parse_args()


def setting(word: str) -> tuple[str, Any]:
    """ "block_size=32" -> ("block_size", 32); what is no JSON is text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def windows(llm: LLM, arguments: argparse.Namespace) -> list[list[int]]:
    """The first tokens of the text, in equal parts; a rest that fills no window is left out."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    # A token is hardly ever more than 16 bytes: not the whole text needs to be tokenized for its beginning.
    ids = tokenizer.encode(arguments.text.read_text()[: 16 * arguments.tokens])[: arguments.tokens]
    starts = range(0, len(ids) - arguments.window + 1, arguments.window)
    return [ids[start : start + arguments.window] for start in starts]


def losses(llm: LLM, several: list[list[int]], at_once: int = 4) -> list[float]:
    """The negative log-probability of every token but the first of each window."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found: list[float] = []
    began = time.monotonic()
    for start in range(0, len(several), at_once):
        for output in llm.generate(list(several[start : start + at_once]), params, use_tqdm=False):
            if output.error is not None:
                raise SystemExit(f"a window failed: {output.error}")
            for token, entry in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
                assert entry is not None
                found.append(-entry[token].logprob)
        speed = len(found) / (time.monotonic() - began)
        print(f"  {len(found)} tokens, perplexity {perplexity(found):.4f}, {speed:.0f} tok/s", flush=True)
    return found


def perplexity(losses: list[float]) -> float:
    return math.exp(statistics.fmean(losses))


if __name__ == "__main__":
    main()
