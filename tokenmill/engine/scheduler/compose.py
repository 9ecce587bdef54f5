"""Composer: writes what each request is given into a step, as plain data for the runner."""

from __future__ import annotations

from tokenmill.engine.adapters import NO_SLOT
from tokenmill.engine.request import Request, Wait
from tokenmill.engine.scheduler.lifecycle import Lifecycle
from tokenmill.engine.scheduler.shared import SharedPrefixFinder
from tokenmill.engine.scheduler.stages import Sets
from tokenmill.engine.step import Step, is_speculative

Share = tuple[Request, int, int]  # request, first position, how many tokens


class Composer:
    """Notes in each request what the step will bring it, so that the next one can be made before it is committed."""

    def __init__(self, life: Lifecycle, sets: Sets, shared_prefixes: SharedPrefixFinder | None) -> None:
        self._life, self._stages, self.shared_prefixes = life, sets.stages, shared_prefixes
        self.read_prompts = False  # whether the newest step reads any
        self._admitted = False  # rows changed since shared prefixes were last looked for

    def compose(self, step: Step, shares: list[Share], drafting: bool, tree: bool) -> None:
        """Write the shares into the step, single tokens first. drafting: a step that only decodes ends with drafts of
        the device's own; tree: it also has the device verify and draft trees.

        A prompt is read in chunks even where one of them is a single token: ops may sum in another order for single
        tokens, and a prompt's result must not depend on how much room there was beside it.
        """
        singles: list[Share] = []
        drafted: list[Share] = []
        chunks: list[Share] = []
        for share in shares:
            request, start, count = share
            # One that reads its own answer again after a preemption may get a single token, too, and samples nothing.
            is_last = request.num_computed == len(request.tokens) + request.pending  # as `num_tokens`, without the call
            if count == 1 and is_last and start >= request.prompt_len:
                singles.append(share)
            else:
                (drafted if request.drafts else chunks).append(share)
        shares = singles + drafted + chunks
        step.num_singles = len(singles)
        step.requests = [request for request, _, _ in shares]
        step.rows = [request.row for request in step.requests]
        step.starts = [start for _, start, _ in shares]
        step.counts = [count for _, _, count in shares]
        if self._life.adapters is not None and any(request.adapter_key for request in step.requests):
            step.adapters = [request.slot if request.adapter_key else NO_SLOT for request in step.requests]
        if self._life.limits.float32_retry:
            step.in_float32 = [index for index, request in enumerate(step.requests) if request.in_float32]
        samples = step.samples
        for request, start, count in shares:
            request.in_flight += 1
            drafts = request.drafts
            beams = request.beams
            if request.pruned:
                step.pruned[request.row] = request.pruned
            if request.unsure:
                step.slack[request.row] = request.unsure
            if request.pooling is None and request.num_computed == len(request.tokens) + request.pending:
                verified = request.num_drafts if drafts else 0
                samples.append(1 + verified)
                request.pending += 1
                request.unsure += verified
                request.waits_for = None if beams is None else Wait.ROUND
                if request.grammar is not None and request.grammar.mask is not None:
                    request.waits_for = Wait.GRAMMAR  # what may come next is known once it is known what came
                    step.masks[request.row] = [request.grammar.mask, *request.grammar.masks_behind(drafts)]
                if request.followers:
                    self._life.release_followers(request)
            else:
                samples.append(0)
                if request.pooling == "mean" or (request.pooling and request.num_computed == request.prompt_len):
                    step.pooling[request.row] = request.pooling, request.prompt_len
            if drafts:
                if samples[-1] > 1:
                    step.drafts[request.row] = drafts
                request.drafts = []
            if beams is not None and count == 1:
                step.chosen.append((request.row, start, request.tokens[start]))
            if self._stages > 1:
                _tell(step, request, start + count)
            wanted = request.params.prompt_logprobs
            scored = request.scored_from + len(request.prompt_logprobs)
            if wanted is not None and start < request.prompt_len > scored:
                step.prompt_logprobs[request.row] = (wanted, request.prompt_len)
        self.read_prompts = bool(chunks)
        step.drafting = drafting and not (chunks or step.chosen)
        step.tree = tree and step.drafting
        self._admitted |= bool(step.admissions)
        if self.shared_prefixes is not None and not is_speculative(step):
            together, starts = step.requests[: step.num_singles], step.starts[: step.num_singles]
            step.shared = self.shared_prefixes.find(together, starts, self._admitted)
            self._admitted = False
        self._life.stats.steps += 1
        self._life.stats.tokens += step.num_tokens


def _tell(step: Step, request: Request, end: int) -> None:
    """Tokens before `end` that the last stage has sampled: the others know none but those they are told."""
    known = min(end, len(request.tokens))
    step.told += [(request.row, at, request.tokens[at]) for at in range(request.told, known)]
    request.told = max(request.told, known)
