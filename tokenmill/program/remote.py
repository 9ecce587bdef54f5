"""RemoteLLM: programs on a server of tokenmill. Each has a session there, which is renewed while the program runs."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.outputs import CompletionOutput, Logprob, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.program.connection import Connection
from tokenmill.program.expressions import Gen
from tokenmill.program.operations import Choose, CloseTurn, Generate, OpenTurn, Operation, Usage
from tokenmill.program.waiting import Waiting

MAIN = "main"  # the state that a session begins with
MOST_CALLS = 64  # at a time, of one `run` or `run_batch`
PATIENCE = 10.0  # seconds for a server to close a session; what is not closed ends with its lease
_OPTIONS = {"priority", "timeout", "cache_salt"}
_PLAIN = SamplingParams()


class RemoteLLM:
    """A server: `f.run(RemoteLLM("http://127.0.0.1:8000", api_key=...), ...)`. Needs neither torch nor the model.

    A session ends when nobody has asked anything of it for `lease_seconds`; as long as the program runs, somebody does.
    `timeout` is how long an answer may be silent.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        lease_seconds: float = 60.0,
        timeout: float = 600.0,
    ) -> None:
        self.connection = Connection(url, api_key, timeout)
        self.model, self.lease_seconds = model, lease_seconds


class RemoteRuntime(Waiting):
    """Programs of one `run`. They work on their sequences one at a time; calls run on threads of their own."""

    def __init__(self, llm: RemoteLLM, options: dict[str, Any]) -> None:
        super().__init__()
        if wrong := options.keys() - _OPTIONS:
            raise InvalidRequest(f"a program on a server has no option {min(wrong)!r}; it may be {', '.join(_OPTIONS)}")
        self.usage = Usage()
        self.connection, self.lease = llm.connection, llm.lease_seconds
        self.options: dict[str, Any] = {"lease_seconds": llm.lease_seconds}
        given = {
            "model": llm.model,
            "priority": options.get("priority"),
            "cache_salt": options.get("cache_salt"),
            "deadline_ms": None if (seconds := options.get("timeout")) is None else seconds * 1000,
        }
        self.options |= {name: value for name, value in given.items() if value is not None}
        self.calls = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="tokenmill-calls")
        self._lock = threading.RLock()
        self._sessions: set[_Session] = set()
        self._closing: list[threading.Thread] = []
        self._over = threading.Event()
        self._renewing: threading.Thread | None = None

    def new_sequence(self) -> RemoteSequence:
        session = _Session(self)
        with self._lock:
            self._sessions.add(session)
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew, name="tokenmill-leases", daemon=True)
                self._renewing.start()
        return RemoteSequence(self, session, MAIN)

    def post(self, work: Callable[[], None]) -> None:
        """Done at once, by whoever asks."""
        with self._lock:
            work()
        self.wake()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A server answers many."""
        yield

    def drive(self, until: Callable[[], bool]) -> None:
        try:
            self.wait(until)
        except BaseException as error:
            self.end(error if isinstance(error, Exception) else TokenmillError("the program was interrupted"))
            raise

    def finish(self, wait: bool) -> None:
        self._over.set()
        for session in list(self._sessions):
            self.close(session)
        for thread in self._closing if wait else ():
            thread.join(PATIENCE)
        self.calls.shutdown(wait=False, cancel_futures=True)

    def close(self, session: _Session) -> None:
        """Meanwhile: calls that run would keep it waiting, which end by that."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        thread = threading.Thread(target=session.close, name="tokenmill-close", daemon=True)
        self._closing.append(thread)
        thread.start()

    def _renew(self) -> None:
        while not self._over.wait(self.lease / 3):
            with self._lock:
                named = [one.id for one in self._sessions if one.id is not None]
            for id in named:
                with contextlib.suppress(TokenmillError):  # its next call hears of it
                    self.connection.ask("POST", f"/v1/sessions/{id}", {})
        self.connection.forget()


class _Session:
    """One program's, opened with its first call."""

    def __init__(self, runtime: RemoteRuntime) -> None:
        self.id: str | None = None
        self.numbers = itertools.count(1)  # names of states
        self._runtime = runtime
        self._closed = False
        self._opening = threading.Lock()

    def path(self) -> str:
        with self._opening:
            if self._closed:
                raise TokenmillError("the program has ended")
            if self.id is None:
                told = self._runtime.connection.ask("POST", "/v1/sessions", self._runtime.options)
                self.id = str(told["id"])
        return f"/v1/sessions/{self.id}"

    def close(self) -> None:
        with self._opening:
            self._closed = True
        if self.id is not None:
            with contextlib.suppress(TokenmillError):  # what is not closed ends with its lease
                self._runtime.connection.ask("DELETE", f"/v1/sessions/{self.id}")
            self._runtime.connection.forget()


class RemoteSequence:
    """What was appended and not yet sent, and what the server has said. Texts travel with the next call behind them."""

    def __init__(self, runtime: RemoteRuntime, session: _Session, name: str) -> None:
        self.name = name
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.idle = True
        self.taken = 0
        self._known = ""  # text that the server has
        self._runtime, self._session = runtime, session
        self._pending: list[Operation | _Fork] = []
        self._busy = False  # with a call
        self._waiting = False  # for the one that it is forked from
        self._closed = False
        self._settling = False  # somebody wants to read what turns look like

    @property
    def text(self) -> str:
        return self._known + "".join(one for one in self._pending if isinstance(one, str))

    def child(self) -> RemoteSequence:
        made = RemoteSequence(self._runtime, self._session, str(next(self._session.numbers)))
        made._waiting, made.idle = True, False
        return made

    def append(self, operations: Sequence[Operation]) -> None:
        self._take(operations)

    def fork(self, children: list[RemoteSequence]) -> None:
        if self.error is not None:
            for child in children:
                child.fail(self.error)
        self._take([_Fork(children)])

    def settle(self) -> None:
        """What the turns of a chat look like is known to the server alone."""
        if any(isinstance(one, OpenTurn) for one in list(self._pending)):
            self._settling = True
            self._runtime.post(self._advance)

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        pending, self._pending = self._pending, []
        self._waiting, self.idle = False, True
        for one in pending:
            for child in one.children if isinstance(one, _Fork) else ():
                child.fail(error)

    def close(self) -> None:
        self._closed, self.idle = True, True
        if self.name == MAIN:
            self._runtime.close(self._session)

    def _take(self, operations: Sequence[Operation | _Fork]) -> None:
        if self._closed:
            return
        self.idle = False
        self.taken += 1
        self._pending += operations
        self._advance()

    def _advance(self) -> None:
        """Send what is pending if there is something to wait for; texts alone only if somebody wants to read them."""
        if self._closed or self.error is not None:
            self.idle = True
        elif not (self._busy or self._waiting):
            asked = any(not isinstance(one, str | OpenTurn | CloseTurn) for one in self._pending)
            self._busy = bool(self._pending) and (asked or self._settling)
            self.idle = not self._busy
            if self._busy:
                self._send()

    def _send(self) -> None:
        """Up to the next fork: it is that text which the branches begin as."""
        forks = [number for number, one in enumerate(self._pending, 1) if isinstance(one, _Fork)]
        end = forks[0] if forks else len(self._pending)
        sent, self._pending = self._pending[:end], self._pending[end:]
        self._settling = self._settling and bool(self._pending)
        try:
            self._runtime.calls.submit(self._call, sent)
        except RuntimeError:
            self.fail(TokenmillError("the program has ended"))

    def _call(self, sent: list[Operation | _Fork]) -> None:
        """On a thread of calls."""
        told: dict[str, Any] = {}
        error: Exception | None = None
        awaited = [one for one in sent if isinstance(one, Generate | Choose)]
        try:
            body = {"state": self.name, "do": _steps(sent), "stream": True}
            for event in self._runtime.connection.stream(self._session.path(), body):
                if "delta" in event:
                    awaited[0].into.text += event["delta"]
                elif "result" in event:
                    _take_in(awaited.pop(0), event["result"])
                else:
                    told = event
                self._runtime.wake()
        except Exception as problem:
            error = (
                problem if isinstance(problem, TokenmillError) else TokenmillError(f"the answer is wrong: {problem!r}")
            )
        self._runtime.post(lambda: self._answered(sent, told, error))

    def _answered(self, sent: list[Operation | _Fork], told: dict[str, Any], error: Exception | None) -> None:
        self._busy = False
        if error is not None:
            self._pending += sent  # with those that are forked in it
            self.fail(error)
            return
        self._runtime.usage.add(Usage(**{one.name: told["usage"][one.name] for one in fields(Usage)}))
        self._known += told["text"]
        self.tokens = [*self.tokens, *told["token_ids"]]
        if isinstance(sent[-1], _Fork):
            for child in sent[-1].children:
                child._known, child.tokens, child._waiting = self._known, self.tokens, False
                child._advance()
        self._advance()


@dataclass(frozen=True, eq=False)
class _Fork:
    children: list[RemoteSequence]


def _steps(sent: Sequence[Operation | _Fork]) -> list[Any]:
    """As the server reads them."""
    found: list[Any] = []
    into = found
    for one in sent:
        if isinstance(one, str):
            into.append(one)
        elif isinstance(one, Generate):
            into.append({"gen": _gen(one.part)})
        elif isinstance(one, Choose):
            part = one.part
            into.append({"select": {"name": part.name, "choices": part.choices, "normalized": part.normalized}})
        elif isinstance(one, OpenTurn):
            turn: dict[str, Any] = {"role": one.role, "content": []}
            found.append(turn)
            into = turn["content"]
        elif isinstance(one, CloseTurn):
            into = found
        else:
            found.append({"fork": [child.name for child in one.children]})
    return found


def _gen(part: Gen) -> dict[str, Any]:
    """What is not as it is anyway."""
    given = {name: value for name, value in asdict(part.params).items() if value != getattr(_PLAIN, name)}
    return given | {"name": part.name, "max_tokens": part.params.max_tokens}


def _take_in(step: Generate | Choose, told: dict[str, Any]) -> None:
    variable = step.into
    if isinstance(step, Choose):
        variable.meta = {"scores": told["scores"]}
    else:
        logprobs = told["logprobs"]
        tables = (
            None
            if logprobs is None
            else [
                {one["id"]: Logprob(one["logprob"], one["rank"], one["token"]) for one in table} for table in logprobs
            ]
        )
        tokens, finish = told["token_ids"], told["finish_reason"]
        total = None if tables is None else sum(table[token].logprob for token, table in zip(tokens, tables))
        said = CompletionOutput(0, told["text"], tokens, total, tables, finish, told["stop_reason"])
        output = RequestOutput(told.get("id", ""), None, [], [said], finished=True)
        variable.meta = {"finish_reason": finish, "output": output}
    variable.text, variable.done = told["text"], True
