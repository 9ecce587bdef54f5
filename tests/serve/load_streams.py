"""Many streams at once through the official client, each held against the answer that its prompt gets alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import httpx
import openai

WORDS = "mill river stone wheel grain flour water wind miller village bread winter horse road bridge tower song"


@dataclass
class Fate:
    """What became of the streams."""

    equal: int = 0
    lost: int = 0
    mixed_up: int = 0
    different: int = 0
    at_once: int = 0  # most streams that were open at the same time


def questions(count: int) -> list[str]:
    dice, words = random.Random(7), WORDS.split()
    return [f"{number}: tell me of {' '.join(dice.choices(words, k=2 + number % 22))}." for number in range(count)]


async def load(url: str, count: int, max_tokens: int) -> Fate:
    """Every answer alone, one after the other, and then all of them at once."""
    limits, fate, now_open = httpx.Limits(max_connections=None), Fate(), 0
    http = httpx.AsyncClient(limits=limits, timeout=900)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0) as client:

        async def answer(question: str, salt: str) -> str | None:
            """The text of a stream that came to its end."""
            nonlocal now_open
            stream = await client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=max_tokens,
                stream=True,
                extra_body={"cache_salt": salt},  # the second time nothing of the first is in the cache
            )
            now_open += 1
            fate.at_once = max(fate.at_once, now_open)
            text, finish = "", None
            async for chunk in stream:
                assert finish is None, "something came after the end"
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason
            now_open -= 1
            return text if finish in ("stop", "length") else None

        asked = questions(count)
        alone = [await answer(question, "alone") for question in asked]
        together = await asyncio.gather(*(answer(one, "together") for one in asked), return_exceptions=True)
    whose = Counter(alone)
    for said, right in zip(together, alone, strict=True):
        assert right, "an answer that is empty when it is asked for alone shows nothing"
        if isinstance(said, BaseException) or said is None:
            fate.lost += 1
        elif said == right:
            fate.equal += 1
        elif whose[said]:
            fate.mixed_up += 1
        else:
            fate.different += 1
    return fate
