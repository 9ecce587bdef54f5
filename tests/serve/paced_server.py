"""A server that answers by the clock: what a client should measure of it is known, however busy the machine is."""

from __future__ import annotations

import asyncio
import json
import zlib

FIRST, GAP = 0.3, 0.05  # seconds; the first token of about half of all prompts takes twice as long
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def first(prompt: str) -> float:
    """Seconds to a prompt's first token: whoever asks, and whenever."""
    return FIRST * (1 + zlib.crc32(prompt.encode()) % 2)


def event(content: str) -> bytes:
    data = f"data: {content}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    return event(json.dumps({"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}))


async def answer(prompt: str, tokens: int, writer: asyncio.StreamWriter) -> None:
    clock = asyncio.get_running_loop()
    due = clock.time() + first(prompt)
    writer.write(HEAD)
    for place in range(tokens):
        await asyncio.sleep(due - clock.time())  # by the clock: what was late does not make the next one late
        writer.write(chunk(" mill", "length" if place == tokens - 1 else None))
        due += GAP
    usage = {"prompt_tokens": 4, "completion_tokens": tokens, "total_tokens": 4 + tokens}
    told = {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [], "usage": usage}
    writer.write(event(json.dumps(told)) + event("[DONE]") + b"0\r\n\r\n")


async def main() -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not head.startswith(b"POST "):  # it has no metrics
                    writer.write(NOT_FOUND)
                    continue
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                asked = json.loads(await reader.readexactly(length))
                await answer(asked["prompt"], asked["max_tokens"], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
