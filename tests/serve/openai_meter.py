"""An independent client: load through OpenAI's own package, timed and summed up with nothing of tokenmill's.

Reads one JSON line per load from stdin, answers one JSON line. The clock is the system's monotonic one, so that whoever
asks can say when to begin.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx
import openai


async def one(client: openai.AsyncOpenAI, prompt: str, max_tokens: int, due: float | None) -> dict[str, Any]:
    if due is not None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    began = time.perf_counter() if due is None else due
    stamps: list[float] = []
    count = 0
    stream = await client.completions.create(
        model="default",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            stamps.append(time.perf_counter())
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
    return {"began": began, "ended": time.perf_counter(), "stamps": stamps, "count": count}


async def load(client: openai.AsyncOpenAI, ask: dict[str, Any]) -> dict[str, float]:
    start = ask.get("start")
    gate = asyncio.Semaphore(ask["streams"])

    async def held(prompt: str, at: float | None) -> dict[str, Any]:
        if start is not None and at is not None:
            return await one(client, prompt, ask["max_tokens"], start + at)
        async with gate:
            return await one(client, prompt, ask["max_tokens"], None)

    begin = time.perf_counter() if start is None else start
    asked = zip(ask["prompts"], ask.get("at") or [None] * len(ask["prompts"]))
    answers = await asyncio.gather(*(held(*pair) for pair in asked))
    elapsed = max(answer["ended"] for answer in answers) - begin
    first = [answer["stamps"][0] - answer["began"] for answer in answers]
    between = [b - a for answer in answers for a, b in zip(answer["stamps"][:-1], answer["stamps"][1:])]
    return {
        "throughput": sum(answer["count"] for answer in answers) / elapsed,
        "ttft": sum(first) / len(first),
        "itl": sum(between) / len(between),
        "e2e": sum(answer["ended"] - answer["began"] for answer in answers) / len(answers),
    }


async def main(url: str) -> None:
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=600)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await load(client, json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
