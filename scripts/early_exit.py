"""Is it worth leaving a model early? Layers that a token could skip, against how often another token is chosen then.

    python scripts/early_exit.py                       # the default model, on answers that it writes itself
    python scripts/early_exit.py MODEL --tokens 50k --layers 16 20 24 28

For each exit layer a linear probe of the hidden state learns whether the last norm and the head would choose there what
they choose behind all layers. Its threshold is the lowest at which, on texts that the probe has not seen, leaving early
and choosing another token is rarer than the risk, with 95 % confidence (Clopper-Pearson); a third part of the texts
then shows what came of it.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import torch

from tokenmill import LLM
from tokenmill.draft.data import write_texts
from tokenmill.draft.states import States, logits_parts, runner_of, states_of
from tokenmill.draft.train import count
from tokenmill.engine.build import Built
from tokenmill.model.decoder import Decoder

RISKS = (0.01, 0.02, 0.05)
CONFIDENCE = 0.95
STEPS, RIDGE = 60, 1e-3  # of the probes' training


def first_layers(built: Built, layers: int) -> Built:
    """The same engine with so many layers, and the last norm and the head behind them."""
    whole, runner = runner_of(built).decoder, runner_of(built)
    spec = replace(whole.spec, num_layers=layers, ropes=whole.spec.ropes[:layers], windows=whole.spec.windows[:layers])
    runner.decoder = Decoder(spec, whole.weights, whole.ops, max_len=runner.state.max_len)
    return built


def choices(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n]
    return torch.cat([logits.argmax(-1) for _, logits in logits_parts(decoder, hidden)])


def probe(hidden: torch.Tensor, agrees: torch.Tensor) -> torch.Tensor:  # [n, hidden], [n] -> [hidden + 1]
    """Logistic regression."""
    weights = torch.zeros(hidden.shape[1] + 1, requires_grad=True)
    newton = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        newton.zero_grad()
        found = torch.nn.functional.binary_cross_entropy_with_logits(score(weights, hidden), agrees.float())
        found = found + RIDGE * weights.square().sum()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    newton.step(loss)  # type: ignore[no-untyped-call, arg-type]
    return weights.detach()


def score(weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ weights[:-1] + weights[-1]


def upper_bound(wrong: int, of: int) -> float:
    """Of a share that was seen so often: Clopper-Pearson, by bisection of the binomial's tail."""
    low, high = wrong / of, 1.0
    for _ in range(40):
        share = (low + high) / 2
        if share >= 1.0:
            break
        logs = [
            math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
            + k * math.log(share) + (of - k) * math.log1p(-share)
            for k in range(max(0, wrong - 2000), wrong + 1)
        ]  # fmt: skip
        low, high = (share, high) if sum(map(math.exp, logs)) > 1 - CONFIDENCE else (low, share)
    return high


def threshold(scores: torch.Tensor, agrees: torch.Tensor, risk: float) -> float:
    """The lowest whose bound keeps to the risk; infinite where none does."""
    order = scores.argsort(descending=True)
    wrong = (~agrees[order]).cumsum(0)
    low, high = 0, len(order)  # exits: that many keep to the risk, and that many do not
    while high - low > 1:
        middle = (low + high) // 2
        kept = upper_bound(int(wrong[middle - 1]), len(order)) <= risk
        low, high = (middle, high) if kept else (low, middle)
    return float(scores[order[low - 1]]) if low else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--tokens", default="20k")
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with LLM(given.model, speculation="off", seed=given.seed) as llm:
        built = llm._built
        say = lambda text: print(text, flush=True)  # noqa: E731
        texts = write_texts(llm, built.spec, count(given.tokens), given.seed, built.settings.max_len, say)
        whole = runner_of(built).decoder
        full: States = states_of(built, texts)
        expected = choices(whole, full.hidden)
        mine = full.is_answer
        parts = [mine & (full.spans // 2 % 5 < 3), mine & (full.spans // 2 % 5 == 3), mine & (full.spans // 2 % 5 == 4)]
        total = whole.spec.num_layers
        say(f"{int(mine.sum())} tokens of answers; layers of {total}, risk of another token, and what came of it")
        columns = [f" | {f'risk {risk:.0%}: leave':>15} {'others':>14} {'saved':>6}" for risk in RISKS]
        say(f"{'layer':>5} {'agrees':>7}" + "".join(columns))
        for layer in given.layers or [total * share // 10 for share in (5, 6, 7, 8, 9)] + [total - 2, total - 1]:
            hidden = states_of(first_layers(built, layer), texts).hidden.float()
            agrees = choices(runner_of(built).decoder, hidden) == expected
            runner_of(built).decoder = whole
            weights = probe(hidden[parts[0]], agrees[parts[0]])
            line = f"{layer:5d} {float(agrees[mine].float().mean()):7.1%}"
            for risk in RISKS:
                least = threshold(score(weights, hidden[parts[1]]), agrees[parts[1]], risk)
                leaves, right = score(weights, hidden[parts[2]]) >= least, agrees[parts[2]]
                wrong, of = int((leaves & ~right).sum()), len(right)
                share = float(leaves.float().mean())
                bound = f"{wrong / of:.2%} < {upper_bound(wrong, of):.2%}"
                line += f" | {share:15.1%} {bound:>14} {share * (1 - layer / total):6.1%}"
            say(line)


if __name__ == "__main__":
    main()
