"""Modules: parts of prompts that have keys and values of their own. Each is computed once, alone behind a fixed start,
and copied to wherever a prompt has it.

Where it stands alone, a module is an ordinary sequence: its blocks are in the prefix index under that sequence's names,
and shared, evicted, or kept in other tiers like any. What is copied out of them follows from other tokens than those
before it, and so does all that is computed behind: none of it is ever published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from tokenmill.engine.request import Finish, Module, Request, State, Wait
from tokenmill.engine.step import Step
from tokenmill.kv.moves import Placement
from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.engine.scheduler.lifecycle import Lifecycle

LEAST_COPIED = 32  # tokens: fewer are read
TRIES = 3  # times that a request waits for modules, before it goes on with those that are there
_READ_ONLY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class ModuleRules:
    """How modules are computed and placed."""

    start: Callable[[], Sequence[int]]  # tokens that every one stands behind where it is alone; asked for once
    reread: int  # first tokens of each that are computed in every prompt


@dataclass(slots=True)
class _Computed:
    """A module on its way."""

    request: Request
    waiting: dict[str, Request] = field(default_factory=dict)


class Modules:
    """Has modules computed for the requests that wait for them, and says what is copied into a row."""

    def __init__(self, life: Lifecycle, rules: ModuleRules) -> None:
        self.life, self.kv, self.rules = life, life.kv, rules
        self.used = False  # whether any was ever computed
        self._coming: dict[bytes, _Computed] = {}  # by the name of a module's last block
        self._places: dict[str, tuple[int, set[bytes]]] = {}  # who waits: its place in the queue, and for what
        self._count = 0

    @cached_property
    def start(self) -> list[int]:
        return list(self.rules.start())

    def missing(self, request: Request) -> dict[bytes, Module]:
        """What it has to wait for, by the names of the last blocks."""
        if request.gathered >= TRIES or request.in_flight or request.fork_from is not None or request.beams is not None:
            return {}
        if not self._may_have(request):
            return {}
        found = len(self.kv.match(request)) * self.kv.block_size
        return {one.identities[-1]: one for one in self._copyable(request, found) if not self._blocks_of(one)}

    def gather(self, request: Request, missing: dict[bytes, Module]) -> None:
        """Park the request until its modules are there, which takes requests of their own."""
        request.gathered += 1
        self.used = True
        self._places[request.id] = self.life.waiting.place(request), set(missing)
        self.life.waiting.remove(request)
        self.life.park(request, Wait.MODULES)
        for name, one in missing.items():
            if name not in self._coming:
                self._coming[name] = _Computed(self._alone(request, one))
            self._coming[name].waiting[request.id] = request

    def room(self, request: Request) -> int:
        """Blocks for the request and all that would be copied into it."""
        apart = len({name for one in request.modules for name in one.identities})
        return self.kv.blocks_for(max(len(request.tokens) + 1, self.life.limits.reserved_tokens)) + apart

    def blocks(self, request: Request, hits: int) -> list[int]:
        """What would be copied from, for a request that starts on so many cached blocks."""
        if not self._may_have(request):
            return []
        copyable = self._copyable(request, hits * self.kv.block_size)
        return list(dict.fromkeys(block for one in copyable for block in self._blocks_of(one)))

    def place(self, step: Step, request: Request) -> list[int]:
        """Have the step copy what is there into the request's row. Returns the blocks that it copies from, each with a
        reference that is given back when the step is done."""
        request.gathered = 0
        if not self._may_have(request):
            return []
        start, sources = len(self.start), dict[int, None]()
        last = request.prompt_len - 1  # is computed, for its logits; and again when the request was preempted
        for one in self._copyable(request, request.num_computed):
            blocks = self._blocks_of(one)
            first, end = max(one.first + self.rules.reread, request.num_computed), min(one.end, last)
            if not blocks:
                continue
            step.placements.append(Placement(request.row, first, end - first, start + first - one.first, tuple(blocks)))
            request.copied.append((first, end))
            sources.update(dict.fromkeys(blocks))
        if request.copied:
            request.num_exact = request.copied[0][0]
            self.kv.stats.placed += sum(end - first for first, end in request.copied)
        self.kv.pool.share(sources)
        return list(sources)

    def ended(self, module: Request) -> None:
        """One is computed, or will never be: who waits for no other is queued at its old place."""
        for name, one in list(self._coming.items()):
            if one.request is not module:
                continue
            del self._coming[name]
            for waiting in one.waiting.values():
                place, names = self._places[waiting.id]
                names.discard(name)
                if not names:
                    del self._places[waiting.id]
                    self.life.queue(waiting, place)

    def gave_up(self, request: Request) -> None:
        """A request that may have waited has ended: what nobody else wants is not computed."""
        _, names = self._places.pop(request.id, (0, set[bytes]()))
        for name in names:
            one = self._coming[name]
            del one.waiting[request.id]
            if not one.waiting:
                del self._coming[name]
                self.life.finish(one.request, Finish.CANCELLED, one.request.arrival)

    def check_integrity(self) -> None:
        waiting = {id for id, one in self.life.parked.items() if one.waits_for is Wait.MODULES}
        if waiting != set(self._places):
            raise AssertionError(f"{len(waiting)} requests wait for modules, {len(self._places)} are known to")
        asked = {(name, id) for name, one in self._coming.items() for id in one.waiting}
        if asked != {(name, id) for id, (_, names) in self._places.items() for name in names}:
            raise AssertionError("who waits for a module and what each waits for disagree")
        if any(one.request.state is State.FINISHED for one in self._coming.values()):
            raise AssertionError("a module is waited for that has ended")

    def _may_have(self, request: Request) -> bool:
        """Whether anything may be copied for it."""
        if request.avoids_cache or request.reads_all or not (request.modules and self.kv.prefix_caching):
            return False
        if request.adapter_key:  # what stands alone was computed by the model as it is
            return False
        if not request.modules[0].identities:
            self._name(request)
        return bool(request.modules)

    def _name(self, request: Request) -> None:
        """Give its modules their names; those that cannot be copied are none."""
        longest = self.life.limits.max_len
        for one in request.modules:
            tokens = self._tokens(request, one)
            fits = not longest or len(tokens) < longest
            if fits and one.end - one.first >= self.rules.reread + LEAST_COPIED:
                one.identities = self.kv.chain(request.salt, tokens)
        request.modules = [one for one in request.modules if one.identities]
        if self.room(request) > (1 - self.life.limits.watermark) * self.kv.pool.num_blocks:
            request.modules = []  # its copies and what they are made from would never fit at once

    def _tokens(self, request: Request, module: Module) -> list[int]:
        """Of the module where it stands alone, with what fills its last block."""
        tokens = self.start + request.tokens[module.first : module.end]
        return tokens + tokens[:1] * (-len(tokens) % self.kv.block_size)

    def _alone(self, request: Request, module: Module) -> Request:
        """The request that computes it."""
        self._count += 1
        alone = Request(
            f"{request.id}/module/{self._count}",
            self._tokens(request, module),
            _READ_ONLY,
            max_tokens=1,
            seed=0,
            priority=request.priority,
            arrival=request.arrival,
            salt=request.salt,
            is_module=True,
        )
        self.life.register(alone)
        self.life.queue(alone)
        return alone

    def _copyable(self, request: Request, computed: int) -> list[Module]:
        """Its modules of which enough would be copied, where so many of its leading tokens are there."""
        reread, last = self.rules.reread, request.prompt_len - 1
        return [
            one for one in request.modules if min(one.end, last) - max(one.first + reread, computed) >= LEAST_COPIED
        ]

    def _blocks_of(self, module: Module) -> list[int]:
        """Where it stands alone, or nothing where a part is missing or still on its way."""
        blocks = self.kv.index.find_leading(module.identities)
        there = len(blocks) == len(module.identities) and self.kv.unproven.isdisjoint(blocks)
        return blocks if there else []
