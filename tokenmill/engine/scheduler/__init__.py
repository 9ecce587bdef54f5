"""Who runs next: queues, admission, batch composition, preemption. Plain data, no torch."""

from tokenmill.engine.scheduler.scheduler import Delta, Limits, Scheduler

__all__ = ["Delta", "Limits", "Scheduler"]
