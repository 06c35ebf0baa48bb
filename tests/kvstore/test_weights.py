"""To which round weights belong, and when they can be read."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline.errors import DeadlineError, PacelineError, PeerDiedError
from paceline.kvstore.weights import Weights

DEATH = PeerDiedError("server 1 died")


def table() -> dict[str, list[torch.Tensor]]:
    return {name: [torch.zeros(2), torch.zeros(2)] for name in ("a", "b", "c")}


def fail_after(weights: Weights, tensors: dict[str, list[torch.Tensor]], changed: str, error: Exception) -> None:
    def change() -> None:
        with weights.changing(tensors):
            for name in changed:
                tensors[name][0].add_(1.0)
            raise error

    with pytest.raises(type(error)):
        change()


def test_a_round_that_ends_counts() -> None:
    weights, tensors = Weights("worker 0"), table()
    for _ in range(3):
        with weights.changing(tensors):
            tensors["a"][0].add_(1.0)
    weights.read()
    assert weights.round == 3


@pytest.mark.parametrize(("changed", "round"), [("", 1), ("abc", 2)])
def test_a_round_that_fails_before_or_after_all_changes_leaves_whole_weights(
    changed: str, round: int, caplog: pytest.LogCaptureFixture
) -> None:
    weights, tensors = Weights("worker 0", lambda: DEATH), table()
    weights.ended()
    fail_after(weights, tensors, changed, DEATH)
    with caplog.at_level(logging.WARNING):
        weights.read()
        weights.read()
    assert weights.round == round
    [record] = caplog.records
    assert "worker 0: the job has failed (server 1 died)" in record.getMessage()
    assert f"are those of round {round}, the last that is complete here" in record.getMessage()


def test_a_round_that_fails_between_is_an_error_until_another_one_ends() -> None:
    weights, tensors = Weights("worker 0"), table()
    weights.ended(4)
    fail_after(weights, tensors, "b", DeadlineError("late"))
    with pytest.raises(PacelineError, match="1 of 3 weights have the values of round 5, but those of 'a', 'c' are"):
        weights.read()
    with weights.changing(tensors):
        pass
    weights.read()
    assert weights.round == 5


def test_what_is_not_there_is_an_error_while_the_job_goes_on() -> None:
    def bring() -> None:
        raise DeadlineError("late")

    with pytest.raises(DeadlineError, match="late"):
        Weights("worker 0").read(bring)
    Weights("worker 0", lambda: DEATH).read(bring)
