"""DataRank: a rank with requests of its own. It computes its group's part of a step beside those of other groups.

Experts that are divided among all ranks are reached by all of them in every step: a rank whose group has nothing to do
computes its experts for the others (`Decoder.assist`). The first rank of every group tells rank 0 what was found.
"""

from __future__ import annotations

import torch

from tokenmill.engine.runner.answers import hear_answer, tell_answer
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.step import Loss, Pending, Step, StepResult
from tokenmill.model.decoder import Decoder
from tokenmill.model.experts import ExpertLoad
from tokenmill.parallel.communicator import Communicator
from tokenmill.parallel.layout import Layout

COUNTED_EVERY = 64  # steps, after which rank 0 learns how often experts were chosen for other groups


class DataRank:
    def __init__(self, runner: TorchRunner, every: Communicator, layout: Layout) -> None:
        self.runner, self._every, self._layout = runner, every, layout
        _, self.group, self._shard = layout.coordinates(every.rank)
        load = runner.decoder.expert_load
        self.expert_load = None if load is None else ExpertLoad.like(load)  # of all groups, every now and then

    @property
    def decoder(self) -> Decoder:
        return self.runner.decoder

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """On a CPU a step is computed while it is launched. Rank 0 hears the others at once, too: they would wait for
        that, with answers longer than what lies between two ranks, while it waits for them in the next step."""
        if step.number % COUNTED_EVERY == 0:
            self._gather_load()
        mine = step.parts[self.group]
        found: StepResult | None = None
        if mine is None:
            self.decoder.assist(self.decoder.order)
        else:
            found = self.runner.launch(mine).wait()
        if self._every.rank == 0:
            return _Found(StepResult([], parts=(found, *self._others(step))))
        if mine is not None and found is not None and self._shard == 0:
            tell_answer(self._every, 0, mine, found)
        return _Found(StepResult([]))

    def reset(self) -> Loss | None:
        self.runner.reset()
        return None

    def close(self) -> None:
        self.runner.close()

    def _gather_load(self) -> None:
        """What experts were chosen for, in the steps before this one; all ranks are at it."""
        load = self.decoder.expert_load
        if load is not None and self.expert_load is not None:
            first = slice(None, None, self._layout.tp)  # ranks of a group count the same
            self.expert_load.counts.copy_(self._every.all_gather(load.counts)[first].sum(0))
            self.expert_load.dropped.copy_(self._every.all_gather(load.dropped)[first].sum(0))

    def _others(self, step: Step) -> list[StepResult | None]:
        tp = self._layout.tp
        return [
            None if part is None else hear_answer(self._every, group * tp, part)
            for group, part in enumerate(step.parts[1:], 1)
        ]


class _Found:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result
