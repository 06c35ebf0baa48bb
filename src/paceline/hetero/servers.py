"""Relative speeds of servers, from their measured rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.hetero.groups import ALIKE


def server_speeds(rates: Sequence[float]) -> list[float]:
    """Return relative speeds for the placement of keys; the fastest servers have 1.

    Servers whose rates follow each other within the factor of machines that are alike get one speed, so that noise
    moves no keys. A server that was not measured counts as the fastest.

    Args:
        rates: per server, in any unit; 0: not measured.
    """
    known = sorted((rate for rate in rates if rate > 0), reverse=True)
    speeds: dict[float, float] = {}
    classes: list[list[float]] = []
    for rate in known:
        if classes and classes[-1][-1] / rate < ALIKE:
            classes[-1].append(rate)
        else:
            classes.append([rate])
    means = [math.exp(math.fsum(map(math.log, one)) / len(one)) for one in classes]
    for one, mean in zip(classes, means, strict=True):
        speeds |= dict.fromkeys(one, mean / means[0])
    return [speeds.get(rate, 1.0) for rate in rates]
