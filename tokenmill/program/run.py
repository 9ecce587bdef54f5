"""program: makes a Python function a program, which runs once or for many inputs at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.program.remote import RemoteLLM, RemoteRuntime
from tokenmill.program.state import ProgramState

if TYPE_CHECKING:  # these import torch, which programs on a server do without
    from tokenmill.async_llm import AsyncLLM
    from tokenmill.llm import LLM
    from tokenmill.program.asynchronous import AsyncRuntime
    from tokenmill.program.local import LocalRuntime

MAX_THREADS = 64


class Program:
    """A function of a ProgramState and its own arguments. What it returns is `state.result`."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, dict(options)

    def __call__(self, state: ProgramState, *args: Any, **kwargs: Any) -> Any:
        """Inside another program: go on with its state."""
        name = getattr(self, "__name__", "program")
        said = f"{name}(...) takes the state of another program, not {{}}; to run it by itself: {name}.run(llm, ...)"
        _expect(state, ProgramState, said)
        return self._function(state, *args, **kwargs)

    def with_options(self, **options: Any) -> Program:
        """The same with other options of its requests: priority, timeout, cache_salt."""
        return Program(self._function, {**self._options, **options})

    def run(self, llm: LLM | RemoteLLM, *args: Any, **kwargs: Any) -> ProgramState:
        """Once. An error of the program is raised here."""
        [state] = self._run(llm, [(args, kwargs)], 1, False)
        if state.exception is not None:
            raise state.exception
        return state

    def run_batch(
        self,
        llm: LLM | RemoteLLM,
        batch: Sequence[Mapping[str, Any]],
        *,
        num_threads: int = MAX_THREADS,
        progress_bar: bool = False,
        return_exceptions: bool = False,
    ) -> list[ProgramState]:
        """Once for each dict of arguments, up to `num_threads` of them at a time; states in the order of the batch.

        When all have ended the first error is raised, or with `return_exceptions` left in `state.exception`.
        """
        for number, one in enumerate(batch):
            if not isinstance(one, Mapping):
                raise InvalidRequest(f"item {number} of the batch is a {type(one).__name__}; it must be a dict")
        states = self._run(llm, [((), dict(one)) for one in batch], max(1, num_threads), progress_bar)
        for state in states:
            if state.exception is not None and not return_exceptions:
                raise state.exception
        return states

    async def arun(self, llm: AsyncLLM | RemoteLLM, *args: Any, **kwargs: Any) -> ProgramState:
        """Once, on an AsyncLLM or a server; the function is as ever, on a thread of its own. Cancelling ends it."""
        runtime = _async_runtime(llm, self._options)
        state = ProgramState(runtime)
        pool = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-program")
        try:
            await asyncio.get_running_loop().run_in_executor(pool, self._go, state, args, kwargs)
        except asyncio.CancelledError:  # whoever still runs hears of it at the next result that it waits for
            runtime.end(TokenmillError("the program was cancelled"))
            raise
        finally:
            runtime.end(_over())
            with contextlib.suppress(TokenmillError):  # the engine has stopped
                runtime.post(state._close)
            runtime.finish(wait=False)
            pool.shutdown(wait=False)
        if state.exception is not None:
            raise state.exception
        return state

    def _go(self, state: ProgramState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The function to its end, on a thread of its own."""
        try:
            state.result = self._function(state, *args, **kwargs)
            state.sync_all()
        except BaseException as error:
            state.exception = error

    def _run(
        self,
        llm: LLM | RemoteLLM,
        arguments: list[tuple[tuple[Any, ...], dict[str, Any]]],
        threads: int,
        progress_bar: bool,
    ) -> list[ProgramState]:
        runtime = _runtime(llm, self._options)
        states = [ProgramState(runtime) for _ in arguments]
        left = set(range(len(states)))
        bar = _progress_bar(len(states)) if progress_bar else None

        def end(number: int) -> None:  # on the engine's thread
            states[number]._close()
            left.discard(number)
            if bar is not None:
                bar.update(1)

        def one(number: int) -> None:
            args, kwargs = arguments[number]
            self._go(states[number], args, kwargs)
            runtime.post(lambda: end(number))

        pool = ThreadPoolExecutor(max(1, min(threads, len(states))), thread_name_prefix="tokenmill-program")
        futures: list[Future[None]] = []
        try:
            with runtime.alone():
                futures += [pool.submit(one, number) for number in range(len(states))]
                runtime.drive(lambda: not left)
        finally:
            for future in futures:
                future.cancel()
            for number in left:
                states[number]._close()
            runtime.end(_over())
            runtime.finish(wait=True)
            pool.shutdown(wait=False)
            if bar is not None:
                bar.close()
        return states


def program(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a function a program: `@program`, or `@program(cache_salt="tenant")` with options of its requests."""
    if function is None:
        return lambda given: Program(given, options)
    return Program(function, options)


def _runtime(llm: LLM | RemoteLLM, options: dict[str, Any]) -> LocalRuntime | RemoteRuntime:
    if isinstance(llm, RemoteLLM):
        return RemoteRuntime(llm, options)
    from tokenmill.llm import LLM
    from tokenmill.program.local import LocalRuntime

    _expect(llm, LLM, "run and run_batch take an LLM, not {}; for an AsyncLLM: await arun(llm, ...)")
    llm._check_open()
    return LocalRuntime(llm, options)


def _async_runtime(llm: AsyncLLM | RemoteLLM, options: dict[str, Any]) -> AsyncRuntime | RemoteRuntime:
    if isinstance(llm, RemoteLLM):
        return RemoteRuntime(llm, options)
    from tokenmill.async_llm import AsyncLLM
    from tokenmill.program.asynchronous import AsyncRuntime

    _expect(llm, AsyncLLM, "arun takes an AsyncLLM, not {}; for an LLM: run(llm, ...)")
    return AsyncRuntime(llm, options)


def _expect(given: object, kind: type, said: str) -> None:
    if not isinstance(given, kind):
        raise InvalidRequest(said.format(type(given).__name__))


def _over() -> TokenmillError:
    """For whoever asks more of a state than it knows."""
    return TokenmillError("the program has ended; ask for more inside of it, or in another one")


def _progress_bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="programs", unit="run", dynamic_ncols=True, disable=None)
