"""RequestTools: the tools of one request, how the model is told of them and how its calls are found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import count
from typing import Any

from tokenmill.model.marked_text import Marks
from tokenmill.processor import Prompt
from tokenmill.sampling.structured import StructuredOutput
from tokenmill.serve.api.chat_messages import Messages, template_input
from tokenmill.serve.http.request_context import RequestContext
from tokenmill.serve.tool_calls.allowed_tools import allowed_tools, restriction
from tokenmill.serve.tool_calls.definitions import Choice, Tool, checked_choice, checked_tools, structured_from_choice
from tokenmill.serve.tool_calls.parsers import ToolCallParser, format_of, parser_for


class RequestTools:
    """Raises InvalidRequest for tools that are none."""

    def __init__(
        self,
        context: RequestContext,
        tools: list[dict[str, Any]] | None,
        choice: Any = None,
        parallel: bool | None = None,
    ) -> None:
        self._context = context
        self._given = tools
        tokenizer = context.service.tokenizer
        self._template = tokenizer.chat_template if tokenizer is not None else None
        self._parallel = parallel is not False
        self._tools: list[Tool] = []  # that may be called
        self._parsers = 0
        self._only = False  # the model is told of tools that it may not call
        self._choice: Choice = "none"
        self.structured: StructuredOutput | None = None  # that the answer must have; None: any
        if tools is not None or choice is not None:
            offered = checked_tools(tools)
            plain, self._tools = allowed_tools(choice, offered)
            self._only = len(self._tools) < len(offered)
            self._choice = checked_choice(plain, self._tools)
            self.structured = structured_from_choice(self._tools, self._choice, self._parallel)

    @property
    def restriction(self) -> StructuredOutput | None:
        """What holds calls to what is allowed, for an answer that nobody asked to have another form."""
        if self._choice != "auto":
            return None
        return restriction(self._tools if self._only else None, self._parallel, format_of(self._template))

    async def prompt(self, messages: Messages, variables: dict[str, Any] | None = None) -> list[int]:
        shown, options = await self._shown(messages, variables)
        return await self._context.service.prompts.chat_ids(shown, **options)

    async def marked_prompt(self, messages: Messages, variables: dict[str, Any] | None, marks: Marks) -> Prompt:
        """marks: modules that have been taken out of the messages."""
        shown, options = await self._shown(messages, variables)
        return await self._context.service.prompts.chat_prompt(shown, marks, **options)

    async def _shown(self, messages: Messages, variables: dict[str, Any] | None) -> tuple[Messages, dict[str, Any]]:
        """What a template is given."""
        return await self._context.in_thread(
            template_input, messages, self._given, self._choice, self._template, variables
        )

    def parser(self) -> ToolCallParser | None:
        if not self._tools:
            return None
        self._parsers += 1
        return parser_for(
            self._tools, self._choice, format_of(self._template), self._ids(self._parsers), only=self._only
        )

    def _ids(self, parser: int) -> Callable[[], str] | None:
        """Names of calls; through a router, those that every replica would give them. None: any."""
        if self._context.route is None:
            return None
        numbers = count()
        told = f"{self._context.id}/{parser}/"
        return lambda: f"call_{hashlib.blake2b(f'{told}{next(numbers)}'.encode(), digest_size=12).hexdigest()}"
