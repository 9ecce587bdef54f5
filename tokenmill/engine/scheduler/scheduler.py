"""Scheduler: turns waiting and running requests into steps, and results into tokens. Pure in (state, now)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tokenmill.engine.request import Finish, Request, Wait
from tokenmill.engine.scheduler.batching import Batching
from tokenmill.engine.scheduler.commit import Commits
from tokenmill.engine.scheduler.compose import Composer, Share
from tokenmill.engine.scheduler.control import Pace
from tokenmill.engine.scheduler.gate import Gate
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.engine.scheduler.lifecycle import PARKED, RUNNING, WAITING, Delta, Lifecycle, Limits
from tokenmill.engine.scheduler.modules import ModuleRules, Modules
from tokenmill.engine.scheduler.policy import Policy, PriorityClasses
from tokenmill.engine.scheduler.shared import SharedPrefixFinder
from tokenmill.engine.scheduler.stages import Sets
from tokenmill.engine.step import DRAFTED, NODES, Admission, Loss, Step, StepResult
from tokenmill.errors import QueueFull
from tokenmill.kv.manager import KVManager
from tokenmill.kv.transfers import Transfers
from tokenmill.sampling.grammar import Constraint

MAX_ROOM = 8  # waiting requests for which one step makes room


class Scheduler:
    """What runs next. Where requests are is `Lifecycle`'s, what steps bring `Commits`', who breaks them `Isolation`'s,
    and how shares become a step `Composer`'s.

    Two gates: *capacity* (do the blocks fit, after prefix hits and a watermark) and *step* (tokens and rows). Every
    step first makes room for a more important head of the queue, then gives each running request that decodes its
    token, then deals what is left of the token budget to prefills and newcomers, lane by lane.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KVManager,
        policy: Policy | None = None,
        *,
        pace: Pace | None = None,
        batching: Batching | None = None,
        find_shared_prefixes: bool = False,
        isolation: Isolation | None = None,  # that it has in common with others
        modules: ModuleRules | None = None,  # None: parts of prompts that are marked are read like others
    ) -> None:
        if limits.max_step_tokens < limits.max_rows:
            raise ValueError(f"max_step_tokens {limits.max_step_tokens} is below max_rows {limits.max_rows}")
        self.limits, self.kv = limits, kv
        self.policy = policy or PriorityClasses()
        self.pace = pace or Pace(limits)
        self.batching = batching or Batching()
        self.isolation = isolation or Isolation()
        self.sets = Sets(limits.stages)
        self.life = life = Lifecycle(limits, kv, self.policy, self.isolation)
        self.waiting, self.running, self.requests, self.stats = life.waiting, life.running, life.requests, life.stats
        shared_prefixes = SharedPrefixFinder(kv.block_size) if find_shared_prefixes else None
        self._composer = Composer(life, self.sets, shared_prefixes)
        self._promised = 0  # blocks that this step's growth leaves to waiting requests above `_promised_above`
        self._promised_above = 0  # a lane
        self.drafting = False  # have steps that only decode end with drafts of the device's own
        self.tree = False  # and have the device verify and draft trees
        self._tree = False  # whether this step does, if it only decodes
        self.room_ahead = 0  # positions behind what a step computes where these leave keys and values
        self._number = 0
        self.modules = None if modules is None else Modules(life, modules)
        life.modules = self.modules
        self.gate = Gate(life, self.batching, self.pace)
        self._commits = Commits(life, self.isolation, self.batching)

    def add(self, request: Request) -> None:
        """Queue a request, and with it the followers that will fork from its prompt."""
        queued, tokens = len(self.waiting) + self.life.num_compiling, self.waiting.num_tokens
        queued += 0 if self.kv.transfers is None else len(self.kv.transfers.fetches)
        queued += 0 if self.life.adapters is None else self.life.adapters.num_waiting
        for what, count, limit in (
            ("requests", queued + 1, self.limits.max_queued_requests),
            ("tokens", tokens + len(request.tokens) if len(self.waiting) else 0, self.limits.max_queued_tokens),
        ):
            if count > limit:
                self.stats.rejected += 1
                raise QueueFull(
                    f"{queued if what == 'requests' else tokens} {what} are waiting, the limit is {limit}; "
                    f"try again later or raise max_queued_{what}"
                )
        request.common_tokens = self.life.held.common_tokens(request)
        self.life.register(request)
        for follower in request.followers:
            self.life.register(follower)
            self.life.park(follower, Wait.LEADER)
        if request.awaits_mask:
            self.life.park(request, Wait.GRAMMAR)
        else:
            self.life.queue(request)

    def cancel(self, id: str, now: float, why: Finish = Finish.CANCELLED) -> None:
        """End a request at any moment. Tokens of launched steps are dropped."""
        request = self.requests.get(id)
        if request is not None:
            self.life.finish(request, why, now)

    def grammar_moved(self, constraint: Constraint, now: float) -> None:
        """A request's grammar was compiled, its next mask is there, or it came to its end, good or bad."""
        request = self.requests.get(constraint.id)
        if request is None or request.grammar is not constraint:  # it ended meanwhile; its id may be another's
            return
        self._commits.end_with_grammar(request, now)
        if request.state is PARKED and request.waits_for is Wait.GRAMMAR:
            self.life.queue(request)

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when nothing can run before a launched step is committed."""
        if self.life.deadlines and self.life.deadlines[0][0] < now:
            self.life.expire(now)
        if not self.batching.is_continuous:
            for request, why in self.batching.turn(self.running):
                self.life.finish(request, why, now)
        self._promised = 0
        self._tree = False
        self.sets.open(self._number - self.kv.pool.settled)
        step = Step(number=self._number + 1)
        self.gate.step = step.number
        shares: list[Share] = []
        if self.isolation.suspects:
            self._schedule_alone(step, shares)
        else:
            if self.running and len(self.waiting):
                self._make_room(now)
            if self.kv.transfers is not None and len(self.waiting):
                self.gate.look_ahead(now)
            if self.limits.whole_prompts:  # in steps of their own, before anybody decodes
                ready = self.sets.ready(self.running)
                unread = [request for request in ready if request.work() > 1 + request.num_drafts]
                for request in unread:
                    request.drafts = []  # as in _deal_decodes
                self._deal_prefills(step, shares, unread, self.pace.step_tokens, now)
            if not shares:
                prefilling, budget = self._deal_decodes(step, shares)
                if (prefilling or len(self.waiting)) and not self.limits.whole_prompts:
                    decodes = len(shares)
                    budget += sum(request.num_drafts for request, _, _ in shares)  # which are dropped if need be
                    self._deal_prefills(step, shares, prefilling, budget, now)
                    if len(shares) > decodes:
                        _drop_drafts(shares)
        if not shares:
            if step.admissions:
                self._take_back(step)
            return None
        self._number = step.number
        self._composer.compose(step, shares, self.drafting, self._tree)
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> list[Delta]:
        """Take in what a step produced. Steps are committed in the order they were launched."""
        deltas = self._commits.commit(step, result, now)
        if self.pace.adapts:
            self.pace.committed(step, deltas, now)
        return deltas

    def fail(self, steps: Iterable[Step], cause: str, now: float, loss: Loss | None = None) -> list[Delta]:
        """These launched steps are void: their requests start over from the tokens they have; after a loss, all do."""
        return self._commits.fail(steps, cause, now, loss)

    def drain_events(self) -> list[Delta]:
        """Requests that ended outside of a commit (cancelled, expired)."""
        events, self.life.events = self.life.events, []
        return events

    def check_integrity(self) -> None:
        self.life.check_integrity()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.life.events)  # an end that nobody has heard of is work, too

    def drop_held(self, id: str) -> None:
        """Nobody will continue what the request of this id left behind."""
        self.life.held.drop(id)

    def reset_prefix_cache(self, salt: str | None = None) -> None:
        """Forget what can be found of all texts, or of those with this salt; who runs is not touched."""
        self.kv.reset_prefix_cache(salt)
        self.life.held.forget(salt)

    @property
    def parts(self) -> list[Scheduler]:
        """The schedulers that it is made of: see `DataParallelScheduler`."""
        return [self]

    @property
    def transfers(self) -> Transfers | None:
        return self.kv.transfers

    @property
    def has_free_row(self) -> bool:
        return self.gate.has_free_row

    def take_in_transfers(self) -> None:
        """Copies of blocks have ended, well or not: whoever waited for them is queued again."""
        self.gate.take_in_transfers()

    @property
    def finds_shared_prefixes(self) -> bool:
        return self._composer.shared_prefixes is not None

    @property
    def read_prompts(self) -> bool:
        """Whether the newest step reads any."""
        return self._composer.read_prompts

    def _take_back(self, step: Step) -> None:
        """Nobody will hear of this step: who was let in by it, and could not be given a token, waits again."""
        rows = {one.row for one in step.admissions}
        for request in [one for one in self.running if one.row in rows]:
            request.fence = request.last_step
            self.life.preempt(request)

    def _make_room(self, now: float) -> None:
        """Preempt less important requests when the first of the queue lack a row or blocks."""
        rows = blocks = 0  # what those looked at so far will take
        for lane, request in self.waiting.first(MAX_ROOM, now, self.life.may_promote()):
            # Beams that hold memory while a sibling waits for it would wait for each other forever.
            victims = [r for r in self.running if r.lane > lane or _waits_for_others(r)]
            if not victims:
                return
            rows, blocks = rows + 1, blocks + self.gate.admission_need(request)[1]
            kept = {block for r in self.running if r not in victims for block in r.blocks}
            if blocks + len(kept) > self.kv.pool.num_blocks:  # it waits for its own class: nobody else can help
                return
            withheld = self.limits.max_rows - self.pace.rows
            while victims and not self.gate.fits(rows + withheld, blocks, self.gate.free_soon()):
                if not self.life.held.give_up_oldest():
                    self.life.preempt(victims.pop())
            self._promised, self._promised_above = blocks, lane

    def _deal_decodes(self, step: Step, shares: list[Share]) -> tuple[list[Request], int]:
        """One token (and drafts) to every running request that is through its prompt; the others are returned."""
        running = len(self.running)
        budget = max(self.pace.step_tokens, running)
        for_drafts = max(self.limits.max_rows, self.limits.max_verified) - running
        for_drafts = min(for_drafts, self.limits.max_step_tokens - running)
        prefilling: list[Request] = []
        self._tree = self.tree and self._room_for_trees()
        for request in self.sets.ready(self.running):
            work, drafts = request.work(), 0
            if work == 0 or request.state is not RUNNING:
                continue
            if request.drafts:
                wanted = request.max_tokens - (request.num_tokens + request.unsure - request.prompt_len) - 1
                # Proposals are for requests that are through their prompt; with a grammar each needs its own mask.
                through = work == 1 + request.num_drafts and request.beams is None
                if request.grammar is not None:
                    wanted = min(wanted, len(request.grammar.masks_behind(request.drafts)))
                verified = max(0, min(wanted, for_drafts, self._room_for_drafts(request))) if through else 0
                del request.drafts[request.unsure + verified if verified else 0 :]
                drafts = request.num_drafts
                for_drafts -= drafts
                work = request.work()
            if work > 1 + drafts:
                prefilling.append(request)
                continue
            if self._deal(step, shares, request, work):
                budget -= work
        return prefilling, budget

    def _room_for_drafts(self, request: Request) -> int:
        """Nobody gives up a block for a draft."""
        spare = max(0, self.kv.pool.num_free - len(self.running))
        return (len(request.blocks) + spare) * self.kv.block_size - request.num_computed - 1 - request.unsure

    def _room_for_trees(self) -> bool:
        """Nodes are cached behind each other, also those of one depth: more than the row may ever have tokens for."""
        need = 0
        for one in self.running:
            if not one.drafts:
                continue
            furthest = one.num_computed + one.unsure + 1 + NODES
            if one.num_drafts > DRAFTED or furthest > (self.limits.max_len or one.prompt_len + one.max_tokens):
                return False
            need += max(0, self.kv.blocks_for(furthest) - len(one.blocks))
        return need <= max(0, self.kv.pool.num_free - len(self.running))

    def _with_room_ahead(self, request: Request, furthest: int) -> int:
        """Up to where a request that drafts on the device holds blocks: nobody gives up one for that."""
        wanted = min(furthest + self.room_ahead, request.prompt_len + request.max_tokens)
        missing = self.kv.blocks_for(wanted) - len(request.blocks)
        spare = self.kv.pool.num_free - len(self.running) - self._promised
        return max(furthest, wanted) if missing <= 0 or missing <= spare else furthest

    def _deal_prefills(
        self,
        step: Step,
        shares: list[Share],
        prefilling: list[Request],
        budget: int,
        now: float,
    ) -> None:
        queue = deque(request for request in prefilling if request.state is RUNNING)
        enough = budget
        if self.sets.stages > 1:
            enough = self.sets.prompt_tokens(self.waiting.num_tokens + sum(request.work() for request in queue))
        while budget > 0 and enough > 0:
            head = self.waiting.head(now, self.life.may_promote())
            if queue and (head is None or queue[0].lane <= head[0]):
                request = queue.popleft()
            elif head is not None and self.gate.has_free_row and self.gate.fetch(head[1], self.kv.pool.num_free):
                continue
            elif head is not None and self.gate.has_free_row and self.gate.lacks_modules(head[1]):
                if head[1].state is PARKED:
                    continue
                if not queue:
                    return
                request = queue.popleft()
            elif head is not None and self._admit(step, head[1], head[0], now):
                request = head[1]
            elif queue:  # the head does not fit: nobody overtakes it, but those inside go on
                request = queue.popleft()
            else:
                return
            if request.state is not RUNNING:  # one before it in this step needed its blocks
                continue
            count = self._at_once(request, min(request.work(), budget))
            if self.limits.whole_prompts:
                if shares and count < request.work():
                    return
            else:
                count = min(count, enough)
            if count and self._deal(step, shares, request, count):
                budget -= count
                enough -= count

    def _deal(self, step: Step, shares: list[Share], request: Request, count: int) -> bool:
        """Give the request `count` tokens of this step, if their blocks can be had."""
        start = request.num_computed
        end = start + count
        furthest = (start + 1 + NODES if self._tree and request.drafts else end) + request.unsure
        if self.drafting and self.room_ahead:
            furthest = self._with_room_ahead(request, furthest)
        if self.kv.pruning is not None and not self._compact(step, request, furthest):
            return False
        furthest -= request.pruned
        if furthest > len(request.blocks) * self.kv.block_size and not self._grow(step, request, furthest):
            return False
        shares.append((request, start, count))
        request.last_step = request.fence = step.number
        request.last_start = start
        request.num_computed = end - (request.num_drafts if request.drafts else 0)  # drafts may turn out wrong
        if request.copied:
            request.pass_copied()
        if len(request.tokens) >= (request.num_published + 1) * self.kv.block_size:
            self.kv.publish(request)  # so that the next newcomer of this very step can share it
        return True

    def _schedule_alone(self, step: Step, shares: list[Share]) -> None:
        """A request that keeps breaking steps runs without company, so that only it can be blamed."""
        suspect = self.isolation.suspects[0]
        if suspect.waits_for is Wait.ADAPTER:
            self.life.free_a_slot(suspect)
            return
        if self.kv.pool.settled < self._number:  # a step is in flight, with others in it, even if they are gone by now
            return
        if suspect.state is WAITING and not suspect.awaits_mask:
            hits, need = self.gate.admission_need(suspect)
            while need > self.kv.pool.num_free and self.life.held.give_up_oldest():
                hits, need = self.gate.admission_need(suspect)
            while (need > self.kv.pool.num_free or not self.life.free_rows) and self.running:
                self.life.preempt(self.running[-1])
                hits, need = self.gate.admission_need(suspect)
            if need > self.kv.pool.num_free:  # until transfers that hold blocks have ended
                return
            self._place(step, suspect, hits, lane=-1)  # most important, so that it is never the victim
        suspect.drafts = []
        count = self._at_once(suspect, min(suspect.work(), self.limits.max_step_tokens))
        if count:
            self._deal(step, shares, suspect, count)

    def _at_once(self, request: Request, count: int) -> int:
        """How many of these tokens a step may compute: where keys are dropped, all of them see the same ones."""
        pruning = self.kv.pruning
        return count if pruning is None else min(count, pruning.chunk(request.num_computed))

    def _compact(self, step: Step, request: Request, furthest: int) -> bool:
        """Drop what is due of its keys and values; whether there is room for what survives and what it computes."""
        need = self.kv.compaction_need(request, furthest)
        if need is None:
            return True
        if self.kv.is_being_filled(request, step.number) or not self._has_room(step, request, need):
            return False
        compaction, first = self.kv.compact(request, step.number)
        if compaction is not None:
            step.compactions.append(compaction)
        step.blocks.append((request.row, first, request.blocks[first:]))
        return True

    def _grow(self, step: Step, request: Request, slots: int) -> bool:
        """Give the request blocks for so many slots, preempting the least important if there are none."""
        held = len(request.blocks)
        need = self.kv.blocks_for(slots) - held
        fresh = self.kv.grow(request, slots) if self._has_room(step, request, need) else None
        if fresh is None:  # blocks of a launched step come back only after its commit
            return False
        step.blocks.append((request.row, held, fresh))
        return True

    def _has_room(self, step: Step, request: Request, need: int) -> bool:
        """Whether the request can have so many blocks now, the least important being preempted if it must be.

        Where keys are dropped, prompts too take blocks as they go on: who is in the step already stays in it then.
        """
        pool, pruning = self.kv.pool, self.kv.pruning
        if request.lane > self._promised_above:
            need += self._promised
        missing = need - self.gate.free_soon()
        while missing > 0 and self.life.held.give_up_oldest():
            missing = need - self.gate.free_soon()
        while missing > 0:
            victim = self.running[-1]
            if pruning is not None and victim.fence == step.number:
                return False
            missing -= sum(1 for block in victim.blocks if pool.references[block] == 1)  # those come free
            self.life.preempt(victim)
            if victim is request:
                return False
        return need <= pool.num_free

    def _admit(self, step: Step, request: Request, lane: int, now: float) -> bool:
        """The capacity gate."""
        if not self.life.free_rows or request.in_flight or request.awaits_mask:
            return False
        if len(self.running) >= self.pace.rows and not self._is_stuck():
            return False
        hits, need = self.gate.admission_need(request)
        before = 0 if self.kv.transfers is None else self.kv.transfers.expected_before(self.gate.rank(request))
        held, pool = self.life.held, self.kv.pool
        continued = held.find(request.continues)
        while not self.gate.fits(1, need + before, pool.num_free):
            if self.gate.fits(1, need + before, pool.num_free + pool.num_fenced):
                return False  # until a launched step is committed
            # What it continues goes last, and only where nobody else will ever give anything back.
            if not held.give_up_oldest(continued) and not (self._is_stuck() and held.give_up_oldest()):
                return False
            hits, need = self.gate.admission_need(request)  # what was given up may be what it starts on
        admits = self.policy.admits(request, need, self.running, self.kv) and (
            self.batching.is_continuous or self.batching.admits(request, self.running, now)
        )
        if not admits and not self._is_stuck():
            return False
        self._place(step, request, hits, lane)
        cached = step.admissions[-1].num_computed
        if request.metrics.first_scheduled is None:
            request.metrics.first_scheduled = now
            request.metrics.cached_tokens = min(cached, request.prompt_len)
            request.metrics.module_tokens = sum(one.count for one in step.placements if one.row == request.row)
        return True

    def _place(self, step: Step, request: Request, hits: list[int], lane: int) -> None:
        """Give the request a row, its cached or forked prefix, and blocks for what it starts with."""
        self.life.start(request, lane)
        parent, sources = request.fork_from, list[int]()
        if parent is not None and self.gate.can_fork(request, parent):
            step.moves += self.kv.fork(parent, request, request.fork_tokens)
            parent.fence = step.number  # this step copies from it, whether it runs in it or not
            request.in_float32 |= parent.in_float32
        else:
            self.kv.admit(request, hits)
            if request.modules and self.modules is not None:
                sources = self.modules.place(step, request)
        request.fork_from = None
        if self.kv.transfers is not None:
            request.failed_fetches, request.looked_ahead = 0, False
            again = len(request.tokens) - request.num_computed > self.kv.block_size
            self.kv.transfers.recomputed += request.metrics.preemptions > 0 and again
        request.started_on_others = request.num_computed > 0 or bool(sources)
        if request.num_computed == 0 and request.id not in self.batching.done:
            request.prompt_logprobs = []  # they come again
        room = self.kv.slots_for(max(len(request.tokens), self.limits.reserved_tokens))
        if self.kv.grow(request, room) is None:
            raise AssertionError(f"{request} passed the capacity gate but its blocks do not fit")
        if sources:
            self.kv.pool.release(sources, step.number)  # this step copies from them
        step.blocks.append((request.row, 0, list(request.blocks)))
        step.admissions.append(
            Admission(
                row=request.row,
                tokens=list(request.tokens),
                prompt_len=request.prompt_len,
                params=request.params,
                seed=request.seed,
                stop_ids=sorted(request.stop_ids),
                num_computed=request.num_computed,
            )
        )
        request.told = len(request.tokens)
        request.pass_copied()
        if self.kv.pruning is not None:
            request.fence = step.number  # it is in the step, even if it has to wait for what others fill in it

    def _is_stuck(self) -> bool:
        """Whether all who run wait for one who does not (beams for a sibling): whoever can has to come in."""
        return all(_waits_for_others(one) or one.id in self.batching.done for one in self.running)


def _drop_drafts(shares: list[Share]) -> None:
    """Drafts are verified in steps that only decode: beside prompts they would not be recorded."""
    for index, (request, start, _) in enumerate(shares):
        if request.drafts:
            request.drafts = []
            shares[index] = request, start, 1


def _waits_for_others(request: Request) -> bool:
    """It cannot be in a step, and no launched one will change that."""
    return request.waits_for is not None and not request.in_flight
