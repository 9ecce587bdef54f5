"""Fits a roofline's rates to measured steps, by least squares on the logarithm of the error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenmill.plan.solve.roofline import RATE_NAMES, Rates

PRIOR = 0.03  # how much a rate's logarithm is held to where it began, against an error of 1 in a point's logarithm
STEP = 1e-4  # of the numeric derivative
ITERATIONS = 60
MAX_MOVE = 1.0  # of a logarithm, in one iteration

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Fitted:
    rates: Rates
    errors: tuple[float, ...]  # predicted / measured - 1, per point

    @property
    def worst(self) -> float:
        return max(abs(error) for error in self.errors)


def fit(
    start: Rates,
    predict: Callable[[Rates], Sequence[float]],  # seconds of every point
    measured: Sequence[float],
) -> Fitted:
    """Levenberg and Marquardt's method over the logarithms of the rates, so that none can become negative.

    A rate that the points say nothing about stays where it began: a weak prior holds every rate there.
    """
    wanted = np.log(np.array(measured, dtype=np.float64))
    origin = np.log(np.array([getattr(start, name) for name in RATE_NAMES], dtype=np.float64))

    def rates_at(place: Vector) -> Rates:
        found: dict[str, Any] = {name: float(np.exp(value)) for name, value in zip(RATE_NAMES, place)}
        return replace(start, **found)

    def residual(place: Vector) -> Vector:
        off = np.log(np.array(predict(rates_at(place)), dtype=np.float64)) - wanted
        return np.concatenate([off, PRIOR * (place - origin)])

    place, damping = origin.copy(), 1e-2
    now = residual(place)
    units = np.eye(len(RATE_NAMES))
    for _ in range(ITERATIONS):
        slope = np.stack([(residual(place + STEP * unit) - now) / STEP for unit in units], axis=1)
        normal = slope.T @ slope
        move = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * units), -slope.T @ now)
        move = np.clip(move, -MAX_MOVE, MAX_MOVE)
        new = residual(place + move)
        if float(new @ new) < float(now @ now):
            place, now, damping = place + move, new, max(damping / 3, 1e-9)
            if float(np.abs(move).max()) < 1e-6:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    found = rates_at(place)
    return Fitted(found, tuple(one / other - 1 for one, other in zip(predict(found), measured)))
