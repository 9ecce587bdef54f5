"""ProcessorBackend: what answering the calls of programs takes of an engine in this process, whoever turns its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.engine.core import Engine
from tokenmill.errors import InvalidRequest
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.processor import Processor
from tokenmill.program.operations import Usage
from tokenmill.program.sequence import Call
from tokenmill.request_state import RequestState


class ProcessorBackend:
    def __init__(
        self, processor: Processor, engine: Engine, options: dict[str, Any], changed: Callable[[], None]
    ) -> None:
        if processor.tokenizer is None:
            raise InvalidRequest("programs need a tokenizer, but skip_tokenizer_init is set; leave it out")
        self.tokenizer: Tokenizer = processor.tokenizer
        self.usage = Usage()
        self.changed = changed
        self._processor, self._engine, self._options = processor, engine, options

    def prepare(self, call: Call) -> RequestState:
        prompt = {"prompt_token_ids": call.prompt}
        return self._processor.prepare(prompt, call.params, keep=True, continues=call.continues, **self._options)

    def give_up(self, state: RequestState) -> None:
        """Its answer is not wanted any more, and neither is what it keeps, if it has just ended."""
        self._processor.cancel(state)
        self._engine.drop_held(state.id)

    def drop(self, held: str) -> None:
        self._engine.drop_held(held)
