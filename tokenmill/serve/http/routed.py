"""Requests that come through a router: what it says of them, and streams with which another replica can go on.

A router names a request, its seed and its time, so that any replica gives the same answer under the same name. A routed
stream is made of frames, each a line and so many bytes that belong to the answer:

    :BYTES FACTS\\n

FACTS are JSON: the tokens that these bytes were made of, or what else they are. A router that has a frame sends its
bytes on and keeps its facts; with all of them another replica goes on behind the last frame. Nothing is said twice or
left out, because what an answer says is a function of its tokens, and a frame arrives as a whole or not at all.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from tokenmill.errors import InvalidRequest
from tokenmill.request_state import RequestState
from tokenmill.sampling.records import TokenLogprobs
from tokenmill.serve.engine_client.resume import ResumedSequence
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.event_ids import LAST_EVENT_ID, MOST_SEQUENCES, EventIds, Mark, is_event_id
from tokenmill.serve.settings import HttpSettings

ROUTE = "x-tokenmill-route"
SECRET = "x-tokenmill-cluster"
PROTOCOL = 2  # of all that routers and replicas say to each other


class Route(msgspec.Struct, omit_defaults=True):
    """What a router says of a request, in a header."""

    id: str
    created: int
    seed: int
    attempt: int = 0  # others of this request may still run here: they are on their way to be cancelled
    state: int = 0  # bytes at the beginning of the body that are a `Progress`
    probe: bool = False  # only the identities of the prompt are wanted
    prefill: bool = False  # only its keys and values are wanted, which this server pushes to another one
    home: int = 0  # what the router calls this replica in the ids of events

    @property
    def name(self) -> str:
        """Of this attempt: another one may come before the last one is over."""
        return f"{self.id}.{self.attempt}" if self.attempt else self.id


class Progress(msgspec.Struct, omit_defaults=True):
    """How far a stream has come: what its frames said."""

    started: bool = False
    numbered: int = 0  # events that have a number
    sequences: dict[int, ResumedSequence] = {}
    sent: str = ""  # the id of the last event that the client has, where it came with one


class Told(msgspec.Struct, omit_defaults=True):
    """The facts of a frame."""

    sequences: dict[int, ResumedSequence] = {}  # what is new of each
    numbered: int = 0
    start: bool = False
    end: bool = False  # nothing follows
    error: int = 0  # the status of the error that these bytes tell; 503: another replica would do better
    cached: int = 0  # prompt tokens that the prefix cache supplied, once that is known


class Prompted(msgspec.Struct):
    """The answer to a probe."""

    tokens: int
    block_size: int
    chain: str  # identities of full blocks, one behind the other, in base64


class Cancelled(msgspec.Struct):
    """What a router posts to `/cluster/cancel`: attempts at requests that nobody waits for any more."""

    names: list[str]


_encode = msgspec.json.Encoder().encode
_decode_route = msgspec.json.Decoder(Route).decode
_decode_progress = msgspec.json.Decoder(Progress).decode


class Probed(Exception):
    """The prompt of a probe is known; nothing else is to be done."""

    def __init__(self, prompted: Prompted) -> None:
        super().__init__("a probe")
        self.prompted = prompted


def check_peer(request: Request, settings: HttpSettings) -> None:
    """Raise HttpError unless this comes from a router of this cluster."""
    if settings.cluster_secret is not None:
        given = request.headers.get(SECRET, "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), settings.cluster_secret.encode()):
            raise HttpError(
                403,
                "the cluster's secret is missing or another one; start router and replicas with the same "
                "--cluster-secret FILE",
                "wrong_cluster_secret",
            )
    elif settings.keys is not None:
        raise HttpError(
            403,
            "this server wants keys and has no secret by which it would know its router; start both with "
            "--cluster-secret FILE",
            "no_cluster_secret",
        )


def route_of(request: Request, settings: HttpSettings) -> Route | None:
    """What a router says of this request; None where it comes from a client. Raises HttpError."""
    header = request.headers.get(ROUTE)
    if header is None:
        if is_event_id(request.headers.get(LAST_EVENT_ID, "")):
            why = "Last-Event-ID names a stream that came through a router; send it to a router of that cluster"
            raise HttpError(400, why, "invalid_value")
        return None
    check_peer(request, settings)
    try:
        route = _decode_route(header)
    except ValueError as error:
        why = f"the header {ROUTE} cannot be read ({error}); router and replica differ in version"
        raise HttpError(400, why, "invalid_value") from None
    if not route.id.isalnum() or len(route.id) > 64 or not 0 <= route.seed < 2**63 or route.state < 0:
        raise HttpError(400, f"the header {ROUTE} names an id, a seed or a size that cannot be", "invalid_value")
    return route


def progress_of(data: bytes) -> Progress:
    try:
        return _decode_progress(data)
    except ValueError as error:
        raise InvalidRequest(f"what a router says of a stream cannot be read: {error}") from None


class FrameWriter:
    """Cuts a stream into frames, and gives its events ids."""

    def __init__(self, route: Route, states: Sequence[RequestState]) -> None:
        first, self._first = 0, []
        for state in states:
            self._first.append(first)
            first += len(state.sequences)
        self._tokens = [0] * first  # told of each sequence
        self._ended = [False] * first
        self._ids: EventIds | None = None
        if first <= MOST_SEQUENCES:
            self._ids = EventIds(route.id, route.home, route.created, route.seed, first)

    @property
    def has_ids(self) -> bool:
        return self._ids is not None

    def start(self, part: bytes, first: int, numbered: int) -> bytes:
        """What comes before the first token; `first` events of it were told before and are not there."""
        if self._ids is not None:
            part = self._ids.stamp_start(part, first, numbered)
        return framed(part, Told(start=True, numbered=numbered))

    def update(self, number: int, state: RequestState, part: bytes, numbered: int = 0, first: int = 0) -> bytes:
        """What a stream brought; part may be empty, where what it brought has no text yet."""
        found, news = {}, {}
        for index, one in enumerate(state.sequences):
            at = self._first[number] + index
            ended = one.finish is not None
            if one.num_tokens == self._tokens[at] and (ended == self._ended[at]):
                continue
            request, before = one.request, self._tokens[at]
            logprobs: list[TokenLogprobs] | None = None
            if request.logprobs:
                logprobs = request.logprobs[before : one.num_tokens]
            finish = str(one.finish) if ended else None
            found[at] = ResumedSequence(one.tokens_from(before), logprobs, finish)
            news[at] = found[at].tokens, Mark(one.num_tokens, ended)
            self._tokens[at], self._ended[at] = one.num_tokens, ended
        if self._ids is not None:
            part = self._ids.stamp_step(part, news, first, numbered)
        cached = state.leader.metrics.reused_tokens
        return framed(part, Told(found, numbered, cached=cached)) if part or found else b""

    def end(self, part: bytes, first: int, numbered: int) -> bytes:
        """What comes behind the last token; `first` as above."""
        if self._ids is not None:
            part = self._ids.stamp_end(part, first, numbered)
        return framed(part, Told(numbered=numbered, end=True))


def framed(part: bytes, told: Told) -> bytes:
    return b":%d %b\n%b" % (len(part), _encode(told), part)
