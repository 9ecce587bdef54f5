"""What drafts cost and bring at a given acceptance, on public models' shapes with random weights.

    python scripts/gpu_replay.py llama3-8b --acceptance 0.8 --drafts 4 8 --batch 1 16

Answers are computed without drafts, and then drafted, each token right with the given probability. So that rounding
cannot change an answer, which of near ties random weights choose, the next token follows from the last one by far.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from h200_workloads import SHAPES

from tokenmill import LLM
from tokenmill.bench import drafts
from tokenmill.bench.workloads import Mix
from tokenmill.model.decoder import Decoder
from tokenmill.plan.demand.workload import fixed


@torch.inference_mode()
def make_steady(decoder: Decoder) -> None:
    """What layers add is little beside a token's embedding, and that of each is the output weight of the next one."""
    weights, spec = decoder.weights, decoder.spec
    for layer in (weights.layer(index) for index in range(spec.num_layers)):
        layer.attention.o.storage["weight"].mul_(0.02)
        layer.mlp.down.storage["weight"].mul_(0.02)
    if not spec.tie_embeddings:
        weights.lm_head.storage["weight"].copy_(weights.embed.roll(1, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=[*SHAPES])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / "shapes" / arguments.shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
    rows = max(arguments.batch) * (1 + max(arguments.drafts))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "max_num_seqs": rows}
    with LLM(model=str(folder), speculation="suffix", **options) as llm:
        make_steady(llm._built.engine.runner.decoder)
        for length in arguments.drafts:
            points = []
            for batch in arguments.batch:
                mix = Mix(fixed("replayed", batch, arguments.input, arguments.output), vocab=llm._processor.vocab_size)
                found = drafts.repeated(llm, mix, 0, arguments.repeats, 1, arguments.acceptance, length)[1]
                points.append({"batch": batch, "drafts": found})
            print(*drafts.lines(points), sep="\n", flush=True)


if __name__ == "__main__":
    main()
