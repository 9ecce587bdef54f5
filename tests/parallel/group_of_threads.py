"""A whole engine whose ranks are threads of this process, each with its own part of the model."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill import LLM
from tokenmill.config import EngineConfig
from tokenmill.engine import build
from tokenmill.engine.rank_model import rank_model, settings_from
from tokenmill.engine.ranks.adapter_codec import decode_adapter, encode_adapter, is_adapter
from tokenmill.engine.ranks.step_codec import decode_step, encode_step
from tokenmill.engine.step import Pending, Step
from tokenmill.parallel.layout import parse_layout
from tokenmill.parallel.threads import thread_communicators


class GroupOfThreads:
    """Has what a RankGroup has, as long as nothing fails."""

    def __init__(self, ranks: Any, order: dict[str, Any], threads: int, shared_kv: Any) -> None:
        assert shared_kv is None, "threads have no tiers"
        self.size, self._order = ranks.ranks, order
        self.communicators = thread_communicators(self.size)
        self._layout = parse_layout(order["config"]["parallel"])
        groups = range(self.size // self._layout.tp)
        self.tensor_ends = [one for _ in groups for one in thread_communicators(self._layout.tp)]
        self.slots: Any = None  # as of RankGroup
        self._all_slots: list[Any] = []
        self.runners: list[Any] = []
        self.failed: list[BaseException] = []
        self._queues = [queue.SimpleQueue[bytes | None]() for _ in range(1, self.size)]
        self._threads: list[threading.Thread] = []

    @property
    def runner(self) -> Any:
        return self.runners[0]

    def complete(self, make: Any, tell: Any) -> None:
        config, settings = EngineConfig(**self._order["config"]), settings_from(self._order["settings"])
        models = [rank_model(config, rank, settings, tell, self._order["threads"]) for rank in range(1, self.size)]
        makers = [make, *(model.runner for model in models)]
        self._all_slots = [self.slots, *(model.adapters for model in models)]
        ends = zip(makers, self.tensor_ends, self.communicators, strict=True)
        self.runners = [make(near, every) for make, near, every in ends]
        for rank, steps in enumerate(self._queues, 1):
            given = rank, self.runners[rank], steps
            self._threads.append(threading.Thread(target=self._follow, args=given, daemon=True))
            self._threads[-1].start()

    def launch(self, step: Step) -> Pending:
        for steps in self._queues:
            steps.put(encode_step(step))
        return self.runner.launch(step)

    def write_adapter(self, slot: int, weights: Any) -> None:
        self.slots.write(slot, weights)
        for steps in self._queues:
            steps.put(encode_adapter(slot, weights))

    def reset(self) -> None:
        """Nothing is left of a step that was never launched."""
        if self.failed:
            raise AssertionError("a rank failed") from self.failed[0]

    def close(self) -> None:
        for steps in self._queues:
            steps.put(None)
        for thread in self._threads:
            thread.join()

    def _follow(self, rank: int, runner: Any, steps: queue.SimpleQueue[bytes | None]) -> None:
        try:
            while (message := steps.get()) is not None:
                if is_adapter(message):
                    self._all_slots[rank].write(*decode_adapter(message))
                else:
                    runner.launch(decode_step(message, self._layout.coordinates(rank)[1]))
        except BaseException as error:
            self.failed.append(error)
            for end in (*self.communicators, *self.tensor_ends):
                end.abort()


def llm_of_threads(parallel: str, **options: Any) -> LLM:
    """As `LLM(parallel=...)`; `group_of` finds the group."""
    threads = torch.get_num_threads()

    def start(config: EngineConfig, device: torch.device) -> Any:
        count = parse_layout(config.parallel).ranks
        return SimpleNamespace(ranks=count, near=count, machines=None, close=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "start_ranks", start)
        patch.setattr(build, "RankGroup", GroupOfThreads)
        try:
            return LLM(parallel=parallel, **options)
        finally:
            torch.set_num_threads(threads)


def group_of(llm: LLM) -> GroupOfThreads:
    return llm._built.engine.runner  # type: ignore[return-value]
