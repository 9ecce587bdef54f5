"""What is sampled with drafts has the model's own distribution; a biased acceptance would be noticed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "sampling")]
from statistics_helpers import chi_square_z
from tiny import logits_of, write_tiny
from tiny_drafts import drafted, made_head, make_drafts_free

from tokenmill import LLM, SamplingParams
from tokenmill.engine.request import Request
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.ops.native.library import Library, load
from tokenmill.ops.types import DecodeInputs, DecodeTables

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")

VOCAB, DRAWS, SAID = 10, 4000, 4
WAVE = 16  # who starts together decodes together: beside prompts, and in a full step, there are no drafts
PROMPT = [3, 7, 4, 8]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 64, "max_model_len": 32,
}  # fmt: skip


class Likeliest:
    """Drafts what the model finds most probable: half of what a biased acceptance could let through is that."""

    name = "likeliest"
    kinds = 1
    on_device = 0

    def __init__(self, best: dict[tuple[int, ...], int]) -> None:
        self.best = best  # by what was said before

    def prior(self, kind: int, depth: int) -> float:
        return 0.9

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        found: list[Draft | None] = []
        for one in requests:
            said, tokens = list(one.output), []
            while len(said) < SAID:
                tokens.append(self.best[tuple(said)])
                said.append(tokens[-1])
            found.append(Draft(tokens[:length], [0] * len(tokens[:length])) if tokens else None)
        return found

    def ended(self, request: Request) -> None: ...

    def forget(self, salt: str | None = None) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, hidden_size=64, head_dim=16)


@pytest.fixture(scope="module")
def probabilities(model: str) -> torch.Tensor:  # [VOCAB] * SAID: of every answer, by the model's own logits
    with LLM(model, **OPTIONS, ops="reference", speculation="off") as llm:
        decoder = llm._built.engine.runner.decoder  # type: ignore[attr-defined]
        answers = torch.cartesian_prod(*[torch.arange(VOCAB)] * (SAID - 1))
        texts = torch.cat([torch.tensor([PROMPT]).expand(len(answers), -1), answers], 1)
        logits = logits_of(decoder.spec, decoder.weights, texts)[:, len(PROMPT) - 1 :]
    steps = logits.double().softmax(-1).view(*[VOCAB] * (SAID - 1), SAID, VOCAB)
    joint = torch.ones((), dtype=torch.float64)
    for at in range(SAID):
        following = steps[(slice(None),) * at + (0,) * (SAID - 1 - at) + (at,)]  # later tokens change nothing before
        joint = joint[..., None] * following
    return joint


@pytest.fixture(scope="module")
def best(probabilities: torch.Tensor) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for at in range(SAID):
        table = probabilities.sum(tuple(range(at + 1, SAID))) if at + 1 < SAID else probabilities
        for said in torch.cartesian_prod(*[torch.arange(VOCAB)] * at).view(-1, at).tolist() if at else [[]]:
            found[tuple(said)] = int(table[tuple(said)].argmax())
    return found


@pytest.fixture(params=["likeliest", "likeliest, op by op", "suffix", "head"])
def llm(
    request: pytest.FixtureRequest, model: str, best: dict[Any, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    make_drafts_free(monkeypatch)
    more: dict[str, Any] = {"ops": "reference", "cuda_graphs": False} if "op by op" in request.param else {}
    head = f"head:{made_head(model, tmp_path / 'head', OPTIONS, vocab=VOCAB - 2)}" if request.param == "head" else ""
    with LLM(model, **OPTIONS, **more, speculation=head or "suffix") as llm:
        if request.param.startswith("likeliest"):
            llm._built.engine.speculation = Speculation(256, 0.0, [Likeliest(best)])
        yield llm


def sampled(llm: LLM, draws: int = DRAWS) -> torch.Tensor:  # [draws, SAID]
    answers = []
    for first in range(0, draws, WAVE):
        seeds = range(first, min(draws, first + WAVE))
        params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=SAID, ignore_eos=True) for seed in seeds]
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(seeds), params, use_tqdm=False)
        answers += [one.outputs[0].token_ids for one in outputs]
    return torch.tensor(answers)


def strangeness(answers: torch.Tensor, probabilities: torch.Tensor, at: int) -> float:
    """Of the pairs of tokens that stand at `at` and behind it."""
    pairs = probabilities.sum([one for one in range(SAID) if one not in (at, at + 1)])
    observed = torch.bincount(answers[:, at] * VOCAB + answers[:, at + 1], minlength=VOCAB * VOCAB)
    return abs(chi_square_z(observed, pairs.flatten() * len(answers)))


def test_sampled_with_drafts_every_token_has_the_models_own_distribution(llm: LLM, probabilities: torch.Tensor) -> None:
    answers = sampled(llm)
    speculation = llm._built.engine.speculation
    assert speculation is not None and sum(one.accepted for one in speculation.stats.values()) > DRAWS / 20
    assert drafted(llm) > DRAWS / 4
    for at in range(SAID - 1):
        assert strangeness(answers, probabilities, at) < 4


def test_a_biased_acceptance_is_noticed(
    model: str, best: dict[Any, int], probabilities: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of eight drafts that do not hold is let through."""
    make_drafts_free(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    with LLM(model, **OPTIONS, ops="reference", cuda_graphs=False, speculation="suffix") as llm:
        ops = llm._built.engine.runner.decoder.ops  # type: ignore[attr-defined]
        keep = ops.keep_sampled

        def biased(tables: DecodeTables, rows: Any, inputs: DecodeInputs, said: torch.Tensor, numbers: Any, *rest: Any):
            is_followed = (numbers > 0).roll(-1) & inputs.is_draft.bool().roll(-1)
            is_followed[-1] = False
            lucky = torch.rand(len(said), generator=generator) < 1 / 8
            said.copy_(torch.where(is_followed & lucky, inputs.ids.roll(-1).long(), said))
            return keep(tables, rows, inputs, said, numbers, *rest)

        ops.keep_sampled = biased
        llm._built.engine.speculation = Speculation(256, 0.0, [Likeliest(best)])
        answers = sampled(llm)
    assert max(strangeness(answers, probabilities, at) for at in range(SAID - 1)) > 8
