from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.compression import DDPState
from tests.compression import ddp_worker
from tests.hvd.ranks import run

NUMEL, STEPS = 8 * 48 + 48 + 48 * 48 + 48 + 48 + 1, 60


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two gloo processes measured, by way of training."""
    folder = tmp_path_factory.mktemp("ddp")
    return run(ddp_worker.train_in_every_way, 2, str(folder), environment={"GLOO_SOCKET_IFNAME": "lo"})


def weights(result: dict[str, Any], way: str) -> torch.Tensor:
    return torch.tensor(result[way]["weights"])


def mean_loss(ranks: list[dict[str, Any]], way: str, step: int) -> float:
    losses: list[float] = [result[way]["losses"][step] for result in ranks]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("way", ["uncompressed", "lossless"])
def test_hook_that_loses_nothing_equals_plain_ddp(ranks: list[dict[str, Any]], way: str) -> None:
    assert torch.equal(weights(ranks[0], way), weights(ranks[0], "ddp"))


@pytest.mark.parametrize("way", ["2bit", "int8", "topk", "randomk", "powersgd"])
def test_training_with_lossy_codec_ends_close_to_plain_ddp(ranks: list[dict[str, Any]], way: str) -> None:
    start, plain = mean_loss(ranks, "ddp", 0), mean_loss(ranks, "ddp", -1)
    assert plain < 0.5 * start
    assert mean_loss(ranks, way, -1) < plain + 0.1 * (start - plain)
    assert not torch.equal(weights(ranks[0], way), weights(ranks[0], "ddp"))


@pytest.mark.parametrize("way", ["ddp", "uncompressed", "lossless", "2bit", "int8", "topk", "randomk", "powersgd"])
def test_all_ranks_end_with_the_same_weights(ranks: list[dict[str, Any]], way: str) -> None:
    assert torch.equal(weights(ranks[0], way), weights(ranks[1], way))


def test_sent_bytes_show_the_compression(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert NUMEL * STEPS / 4 <= result["2bit"]["sent_bytes"] <= (NUMEL + 24) * STEPS / 4
        assert result["lossless"]["sent_bytes"] == 8 * NUMEL * STEPS


def test_residuals_follow_their_parameters_when_ddp_rearranges_its_buckets() -> None:
    state = DDPState({"type": "2bit", "threshold": 10.0})
    codec = state.codec
    assert codec is not None
    first = state.bucket(0, ((1, 3), (2, 2)), codec)
    codec.encode(torch.arange(5.0), first.state)
    second = state.bucket(0, ((2, 2), (3, 1)), codec)
    assert second.state.state_tensors()["residual"].tolist() == [3.0, 4.0, 0.0]
    third = state.bucket(1, ((1, 3),), codec)
    assert third.state.state_tensors()["residual"].tolist() == [0.0, 1.0, 2.0]
    assert state.bucket(0, ((2, 2), (3, 1)), codec) is second


def test_count_of_dropped_elements_survives_the_rearrangement() -> None:
    state = DDPState("int8")
    assert state.codec is not None
    bucket = state.bucket(0, ((1, 2),), state.codec)
    state.codec.encode(torch.tensor([1.0, float("inf")]), bucket.state)
    state.bucket(0, ((1, 2), (2, 1)), state.codec)
    assert state.dropped == 1


def test_unknown_codec_is_refused_before_training_starts() -> None:
    with pytest.raises(ValueError, match="did you mean"):
        DDPState("2bits")
