"""In a recorded step: says which layer comes, or which experts a layer chose, and waits for their weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.ops.native import call
from tokenmill.ops.native.experts import route_args
from tokenmill.ops.native.library import Library, load
from tokenmill.ops.native.recording import new, row_count
from tokenmill.ops.native.structs import EnterArgs, FetchArgs, ForeseeArgs

Numbers = npt.NDArray[np.int64]


def fence() -> None:
    """What was written before this is seen by others before anything is read behind it. Where there is no library, all
    that is written and read is the interpreter's, whose lock sees to that.
    """
    native = load()
    if isinstance(native, Library):
        native.fence()


def check_told(numbers: int, most: float) -> None:
    """That both sides tell each other the same numbers, and mean the same by most experts."""
    native = load()
    if isinstance(native, Library):
        theirs = native.c.tm_told_numbers(), native.c.tm_most()
        if theirs != (numbers, most):
            raise ValueError(f"steps tell {theirs[0]} numbers and take {theirs[1]} for most, not {numbers} and {most}")


def enter_layer(
    told: Numbers,  # [3] the layer that is computed, how often it was waited for, and how long
    there: Numbers | None,  # whose first number says whether its weights are there; None: they always are
    layer: int,
    bell: int,  # a pipe's end
) -> None:
    call.run(EnterArgs(told=told, there=there, layer=layer, bell=bell))


def fetch_experts(
    chosen: torch.Tensor,  # [tokens, top_k] int64
    told: Numbers,  # by the names in routing.h
    slot: Numbers,  # [experts], as the next four of one layer
    buffer: Numbers,
    owner: Numbers,  # [1]
    used: Numbers,
    early: Numbers,
    number: int,  # the layer's, among those with experts
    slots: int,
    is_last: bool,
    bell: int,
) -> torch.Tensor:  # [tokens, top_k] int64: where each lies
    places = new(tuple(chosen.shape), torch.int64)
    tokens, top_k = chosen.shape
    call.run(FetchArgs(
        told=told, slot=slot, buffer=buffer, owner=owner, used=used, early=early, chosen=chosen, places=places,
        number=number, experts=len(slot), slots=slots, rows=row_count(tokens), top_k=top_k, is_last=int(is_last),
        bell=bell,
    ))  # fmt: skip
    return places


def foresee_experts(
    x: torch.Tensor,  # [tokens, hidden]: what this layer's experts are given
    router: torch.Tensor,  # [experts, hidden] float32, of the next layer
    told: Numbers,
    wish: Numbers,  # [experts]
    slot: Numbers,  # [experts], of the next layer
    bell: int,
    top_k: int,
    groups: int,
    top_groups: int,
) -> None:
    shares, chosen = new((len(x), top_k)), new((len(x), top_k), torch.int64)
    route = route_args(x, router, shares, chosen, False, 1.0, groups, top_groups)
    call.run(ForeseeArgs(route=route, told=told, wish=wish, slot=slot, bell=bell))
