"""What a chat template writes before and after a turn whose content is not known yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmill.errors import InvalidRequest
from tokenmill.processor import Message

# Stands for a content; a template that changes it (cuts, escapes, capitals) is noticed.
CONTENT = "Content7f3aStandsHere"
Render = Callable[[Sequence[Message], bool], str]  # messages, whether an answer is to follow


def turn_texts(render: Render, before: Sequence[Message], role: str) -> tuple[str, str]:
    """The text that opens a turn behind the turns `before`, and the one that closes it."""
    earlier = render(before, False) if before else ""
    whole = render([*before, {"role": role, "content": CONTENT}], False)
    head, found, closing = whole.rpartition(CONTENT)
    if not found or not head.startswith(earlier):
        raise InvalidRequest(
            f"the chat template writes earlier turns another way when a turn of role {role!r} follows, so that turns "
            "cannot be appended; write the conversation's text yourself, or make a state for each of its parts"
        )
    opening = head[len(earlier) :]
    if role == "assistant" and before:  # as when the model is asked, which may be more than what is repeated later
        asked = render(before, True)
        if asked.startswith(earlier):
            opening = asked[len(earlier) :]
    return opening, closing
