"""Recordings on a CPU: what torch was asked to do between `begin` and `end`, done again with the same tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class FakeGraph(TorchDispatchMode):
    """As a CUDA graph, it reads its inputs where they were when it was recorded, and leaves its results there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        self.replays += 1
        anew: dict[int, torch.Tensor] = {}  # what stands for a tensor that was made while this was recorded

        def of(value: Any) -> Any:
            return anew.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, made in self.calls:
            again = func(*tree_map(of, args), **tree_map(of, kwargs))
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor):
                    anew[id(old)] = new
        for _, _, _, made in self.calls:
            for old in tree_leaves(made):
                if isinstance(old, torch.Tensor) and old.shape == of(old).shape and not old._is_view():
                    old.copy_(of(old))


class FakeRecorder:
    """`broken`: the number of the piece that cannot be recorded."""

    def __init__(self, broken: int | None = None) -> None:
        self.graphs: list[FakeGraph] = []
        self.renewed = 0
        self._broken = broken
        self._mode: FakeGraph | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._mode is not None:
                self.end()

    def begin(self) -> None:
        assert self._mode is None
        if len(self.graphs) == self._broken:
            raise RuntimeError("this cannot be recorded")
        self._mode = FakeGraph()
        self._mode.__enter__()

    def end(self) -> FakeGraph:
        assert self._mode is not None
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        self.graphs.append(mode)
        return mode

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._mode is None
        return tensor

    def renew(self) -> None:
        self.renewed += 1
