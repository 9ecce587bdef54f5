"""Lists in pages, as OpenAI's clients and Anthropic's turn them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from tokenmill.errors import InvalidRequest

T = TypeVar("T")


def page(
    request: Request,
    found: Sequence[T],
    id_of: Callable[[T], str],
    default: int = 20,
    most: int = 100,
    after: str = "after",
    before: str = "before",
) -> tuple[list[T], bool]:
    """Those of `found` that the query asks for (`limit`, and which ones they stand after or before), and whether there
    are more in that direction. Raises HttpError."""
    query = request.query_params
    given = query.get("limit", "")
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else default if given == "" else 0
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit is {given[:60]!r}; it must be a whole number from 1 to {most}")
    ids = [id_of(one) for one in found]
    first, last = 0, len(found)
    if (mark := query.get(after)) is not None:
        first = _place(ids, after, mark) + 1
    if (mark := query.get(before)) is not None:
        last = _place(ids, before, mark)
        if after not in query:  # the page that ends there
            return list(found[max(0, last - limit) : last]), last > limit
    return list(found[first : min(last, first + limit)]), first + limit < last


def ordered(request: Request, found: Sequence[T], default: str) -> list[T]:
    """`found` is in ascending order; `order` of the query, or `default`, says how it is told."""
    order = request.query_params.get("order", default)
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:60]!r}; it must be asc or desc")
    return list(found) if order == "asc" else list(found)[::-1]


def listing(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page as both APIs tell it."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"data": data, "has_more": more, **ends}


def _place(ids: list[str], name: str, mark: str) -> int:
    if mark not in ids:
        raise InvalidRequest(f"{name} is {mark[:100]!r}, which is not in this list")
    return ids.index(mark)
