"""Who runs next: queues, admission, batch composition, preemption. Plain data, no torch."""

from tokenmill.engine.scheduler.lifecycle import Delta, Limits
from tokenmill.engine.scheduler.scheduler import Scheduler

__all__ = ["Delta", "Limits", "Scheduler"]
