"""Vectors come from the model's own hidden states, in any chunking, and engines that die are asked again."""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch
from sim_engine import POISON
from sim_service import answer, assert_nothing_left, eventually, greedy, opened, run, solo, strike

from tokenmill.config import EngineConfig
from tokenmill.engine.build import Built, build
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.serve.engine.embedder import Embedder

PROMPT = [(7 * i) % 120 + 3 for i in range(50)]


@pytest.fixture(scope="module")
def built(tiny_model: str) -> Built:
    return build(
        EngineConfig(model=tiny_model, load_format="dummy", dtype="float64", device="cpu", skip_tokenizer_init=True)
    )


def embedder(built: Built, chunk: int) -> Embedder:
    return Embedder(built.engine.runner.decoder, 512, chunk, 16)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_do_not_change_a_vector(built: Built, pooling: str) -> None:
    whole = torch.tensor(embedder(built, 512).vector(PROMPT, pooling))
    assert torch.linalg.vector_norm(whole) == pytest.approx(1.0)
    for chunk in (1, 7, 16, 49):
        torch.testing.assert_close(torch.tensor(embedder(built, chunk).vector(PROMPT, pooling)), whole)


def test_the_last_state_is_the_one_the_next_token_is_chosen_from(built: Built) -> None:
    from tokenmill import SamplingParams
    from tokenmill.front import Front

    front = Front(built, 0)
    follow = front.prepare(PROMPT, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    front.submit(follow)
    while not follow.finished:
        front.step()
    vector = torch.tensor(embedder(built, 512).vector(PROMPT, "last"), dtype=torch.float64)
    logits = built.engine.runner.decoder.logits(vector[None])
    assert [int(logits.argmax())] == follow.output().outputs[0].token_ids


def test_the_mean_is_the_mean_of_every_last_state(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "normalize", lambda x, dim: x)
    one = embedder(built, 8)
    states = [torch.tensor(one.vector(PROMPT[: n + 1], "last")) for n in range(20)]
    torch.testing.assert_close(torch.tensor(one.vector(PROMPT[:20], "mean")), torch.stack(states).sum(0))


def test_what_cannot_be_embedded_is_refused(built: Built) -> None:
    with pytest.raises(InvalidRequest, match="may have 512 tokens; this one has 513"):
        embedder(built, 64).vector([5] * 513, "mean")
    with pytest.raises(InvalidRequest, match="pooling is 'max'"):
        embedder(built, 64).vector([5], "max")


def test_vectors_are_asked_for_again_when_the_engine_dies() -> None:
    async def main() -> None:
        async with opened({"step": 0.01}) as service:
            prompts = [[5] * (i + 1) for i in range(40)]
            talk = asyncio.create_task(answer(service, [5, 6], greedy(60)))
            vectors = asyncio.create_task(service.embed(prompts))
            await asyncio.sleep(0.1)
            await strike(service, signal.SIGKILL)
            assert await vectors == [[float(len(prompt)), float(sum(prompt))] for prompt in prompts]
            assert (await talk).outputs[0].token_ids == solo([5, 6], greedy(60))
            assert service.stats().restarts == 1 and not service._supervisor._busy.is_set()
            with pytest.raises(InvalidRequest, match="pooling"):
                await service.embed([[5]], "max")
            with pytest.raises(InvalidRequest, match="empty"):
                await service.embed([[]])
            await assert_nothing_left(service)

    run(main())


def test_a_text_that_ends_engines_is_given_up_with_the_cause() -> None:
    async def main() -> None:
        async with opened(breaker_failures=100) as service:
            with pytest.raises(TokenmillError, match=r"died 3 times with it: .*SIGSEGV"):
                await service.embed([[POISON]])
            assert not service._supervisor._busy.is_set()  # an engine with nothing to do may be silent
            await eventually(service.ready)
            assert await service.embed([[5]]) == [[1.0, 5.0]]

    run(main())


def test_a_text_that_ends_engines_ends_no_other() -> None:
    async def main() -> None:
        async with opened(breaker_failures=100) as service:
            poisoned = asyncio.create_task(service.embed([[POISON]]))
            await eventually(lambda: service._embeddings.pending)
            others = [asyncio.create_task(service.embed([[5] * size])) for size in (1, 2, 3)]
            with pytest.raises(TokenmillError, match="SIGSEGV"):
                await poisoned
            assert await asyncio.gather(*others) == [[[float(size), 5.0 * size]] for size in (1, 2, 3)]

    run(main())
