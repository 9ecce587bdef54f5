"""Prompts: what the front does with a request before it is admitted: renders, counts, checks; long texts in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tokenmill.kv.prefix import IdentityChains
from tokenmill.model.marked_text import Marks
from tokenmill.params import SamplingParams
from tokenmill.processor import Message, Processor, Prompt
from tokenmill.request_state import RequestState
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.adapters import RemoteAdapters
from tokenmill.serve.engine_client.resume import ResumedSequence, resume
from tokenmill.serve.engine_client.text_pool import SHORT, TextPool, size_of

T = TypeVar("T")


class Prompts:
    """Touches nothing that runs. `check_open` and `check_started` raise Unavailable as long as nothing can be told."""

    facts: wire.EngineReady  # there once an engine has told them,
    processor: Processor  # and this with them

    def __init__(
        self,
        texts: TextPool,
        adapters: RemoteAdapters,
        check_open: Callable[[], None],
        check_started: Callable[[], None],
    ) -> None:
        self._texts, self._adapters = texts, adapters
        self._check_open, self._check_started = check_open, check_started

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        said: Sequence[ResumedSequence | None] | None = None,
        **options: Any,
    ) -> RequestState:
        """A request, and with `said` as it is when its sequences have said so much; it is not run. `options` are those
        of `Processor.prepare`. Raises InvalidRequest."""
        self._check_open()
        size = max(size_of(prompt), 0 if params.structured is None else SHORT + 1)  # grammars may take seconds
        request_state = await self._texts.run(size, self.processor.prepare, prompt, params, **options)
        if said is not None:
            await self._texts.run(SHORT + 1, resume, request_state, said, self.facts.vocab_size)
        return request_state

    async def check_params(self, asked: Sequence[SamplingParams]) -> None:
        """Raises InvalidRequest for what no request could ask."""
        self._check_open()

        def check() -> None:
            for params in asked:
                self.processor.check_params(params)

        await self._texts.run(SHORT + 1, check)

    async def identities(self, prompt: Prompt, salt: str, adapter: str = "") -> tuple[int, list[bytes]]:
        """How many tokens a prompt has, and the names of its full blocks in the prefix cache. Raises InvalidRequest."""
        self._check_open()
        block, chain = self.facts.block_size, list[bytes]()

        def name() -> int:
            ids = self.processor.encode(prompt)["prompt_token_ids"]
            if block:
                known = self._adapters.known.get(adapter)
                key = "" if known is None else known.key
                IdentityChains(block, self.facts.pruning).extend(chain, salt, ids, (len(ids) - 1) // block, key)
            return len(ids)

        return await self._texts.run(max(SHORT + 1, size_of(prompt)), name), chain

    async def chat_ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a conversation; options are those of Processor.chat_ids (chat_template, tools, ...)."""
        return await self._rendered(self.processor.chat_ids, messages, options)

    async def chat_prompt(self, messages: Sequence[Message], marks: Marks, **options: Any) -> Prompt:
        """The same with its modules, which have been taken out of the messages."""
        more = sum(map(len, marks.texts))
        return await self._rendered(self.processor.chat_prompt, messages, options | {"marks": marks}, more)

    async def _rendered(
        self, render: Callable[..., T], messages: Sequence[Message], options: dict[str, Any], more: int = 0
    ) -> T:
        """`more` is how many characters there are beside the messages."""
        self._check_started()
        size = more + sum(size_of(one.get("content")) for one in messages)
        size = max(SHORT + 1, size)  # templates may take their time
        return await self._texts.run(size, render, messages, **options)
