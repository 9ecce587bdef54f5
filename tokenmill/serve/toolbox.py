"""Toolbox: the tools of one request, how the model is told of them and how its calls are found."""

from __future__ import annotations

from typing import Any

from tokenmill.serve.call import Call
from tokenmill.serve.chat_messages import Messages, template_input
from tokenmill.serve.tools import Choice, Parser, checked_choice, checked_tools, choice_form, format_of, parser_for


class Toolbox:
    """Raises InvalidRequest for tools that are none."""

    def __init__(
        self, call: Call, tools: list[dict[str, Any]] | None, choice: Any = None, parallel: bool | None = None
    ) -> None:
        self._call = call
        self._given = tools
        self._tools = checked_tools(tools)
        self._choice: Choice = checked_choice(choice, self._tools)
        self.form = choice_form(self._tools, self._choice, parallel is not False)  # of the answer; None: any

    async def prompt(self, messages: Messages, variables: dict[str, Any] | None = None) -> list[int]:
        """The token ids of a conversation."""
        tokenizer = self._call.service.tokenizer
        template = tokenizer.chat_template if tokenizer is not None else None
        shown, options = template_input(messages, self._given, self._choice, template, variables)
        return await self._call.service.chat_ids(shown, **options)

    def parser(self) -> Parser | None:
        tokenizer = self._call.service.tokenizer
        return parser_for(self._tools, self._choice, format_of(tokenizer.chat_template if tokenizer else None))
