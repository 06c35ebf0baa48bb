"""One sentence that says how a job synchronises and why, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.consistency import Policy
from paceline.hetero.forecast import Forecast
from paceline.hetero.groups import Groups
from paceline.hetero.measured import Measured
from paceline.hetero.step_noise import StepNoise

_SHARES = {"equal": "equal batches", "measured": "batches by speed", "pool": "a pool of samples"}


def sentence(measured: Measured, groups: Groups, best: Forecast, others: Sequence[Forecast]) -> str:
    """Return a sentence about the choice and its reason.

    Args:
        measured: times of the machines.
        groups: workers of like speed, the fastest group first.
        best: the choice.
        others: the other ways; the chosen one may be among them.
    """
    against = [f"{rate(one)} with {_called(one)}" for one in others if _called(one) != _called(best)]
    text = f"{_called(best)}: {_machines(measured, groups)}; forecast: {rate(best)}"
    return text + (f", against {_listed(against)}" if against else "")


def named(store_type: str, policy: Policy, shares: str) -> str:
    """Return the name of a way to synchronise."""
    if policy.merge == "first":
        return f"{store_type} with K = {policy.first} and {_SHARES[shares]}"
    if policy.merge == "groups":
        return f"{store_type} with {len(policy.groups)} groups and {_SHARES[shares]}"
    return f"{store_type} with {_SHARES[shares]}"


def _called(one: Forecast) -> str:
    return named(one.store_type, one.policy, one.shares)


def rate(one: Forecast) -> str:
    """Return how many samples per second a way is forecast to train on, and how much stale ones count."""
    stale = f" (stale ones count {one.worth:.2g})" if one.worth < 1 else ""
    return f"{one.samples_per_s:.4g} samples/s{stale}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _machines(measured: Measured, groups: Groups) -> str:
    """Say how unlike the machines are."""
    times, slow = measured.seconds, groups[-1]
    if len(groups) == 1:
        text = f"all {len(times)} workers are alike ({min(times):.3g} to {max(times):.3g} s per step"
    else:
        who = f"worker {slow[0]} takes" if len(slow) == 1 else f"{len(slow)} of {len(times)} workers take"
        ratio = max(times) / min(times)
        text = f"{who} up to {ratio:.2g} times as long as the fastest ({min(times):.3g} s per step"
    return f"{text}, {noise_words(measured.noise)}, {measured.exchange_s:.3g} s per exchange)"


def noise_words(noise: StepNoise) -> str:
    """Return how much the times of steps vary."""
    text = f"jitter {noise.jitter:.0%}"
    if noise.spike_share:
        text += f", {noise.spike_share:.1%} of steps take {noise.spike_factor:.2g} times as long"
    return text
