"""Groups of ranks with requests of their own, simulated: a shadow of memory for each, and one step for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engine.runner.simulated import SimulatedRunner
from tokenmill.engine.step import Loss, Pending, Step, StepResult


class SimulatedGroups:
    """What fails one of them fails the step, as the ranks of a generation do."""

    def __init__(self, runners: Sequence[SimulatedRunner]) -> None:
        self.runners = runners
        self.faults = runners[0].faults

    @property
    def violations(self) -> list[str]:
        return [one for runner in self.runners for one in runner.violations]

    def launch(self, step: Step) -> Pending:
        pairs = zip(self.runners, step.parts, strict=True)
        return _Together([None if part is None else runner.launch(part) for runner, part in pairs])

    def reset(self) -> Loss | None:
        losses = [runner.reset() for runner in self.runners]
        return next((loss for loss in losses if loss is not None), None)

    def close(self) -> None: ...


class _Together:
    def __init__(self, pending: list[Pending | None]) -> None:
        self._pending = pending

    def wait(self) -> StepResult:
        return StepResult([], parts=tuple(None if one is None else one.wait() for one in self._pending))
