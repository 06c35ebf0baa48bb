"""Operations of a batch that run as one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.execute import fuse, group_of, on_gpu_of, run
from paceline.collectives.negotiation.messages import OperationRequest, Response
from paceline.collectives.planes.base import Alone, Staged


def one(name: str, numel: int = 4, **other: Any) -> Response:
    return Response(
        OperationRequest(**({"kind": "allreduce", "name": name, "dtypes": ("float32",), "shapes": ((numel,),)} | other))
    )


def names(groups: list[list[Response]]) -> list[list[str]]:
    return [[response.request.name for response in group] for group in groups]


def test_alike_operations_are_packed_over_others_up_to_the_threshold() -> None:
    responses = [one("a"), one("b", dtypes=("int32",)), one("c"), one("d"), one("e", op=3), one("f", kind="broadcast")]
    assert names(fuse(responses, 32)) == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    assert names(fuse(responses, 1000)) == [["a", "c", "d"], ["b"], ["e"], ["f"]]
    assert names(fuse(responses, 0)) == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]


def test_what_must_not_be_fused_stays_alone() -> None:
    responses = [
        one("a", alone=True),
        one("b", process_set=1),
        one("c", prescale=0.5),
        one("d", device="cuda"),
        one("e"),
    ]
    assert names(fuse(responses, 10**6)) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    mixed = one("g", dtypes=("float32", "int8"), shapes=((1,), (1,)))
    assert names(fuse([one("f"), mixed, one("h")], 10**6)) == [["f", "h"], ["g"]]


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 300))
def test_everything_runs_once_and_fits(sizes: list[int], threshold: int) -> None:
    responses = [one(str(number), numel) for number, numel in enumerate(sizes)]
    groups = fuse(responses, threshold)
    assert sorted(name for group in names(groups) for name in group) == sorted(
        response.request.name for response in responses
    )
    for group in groups:
        assert len(group) == 1 or 4 * sum(sizes[int(name)] for name in names([group])[0]) <= threshold


def test_rank_without_gpu_that_has_joined_takes_part_in_operations_of_gpus_in_host_memory() -> None:
    group = group_of([one("a", device="cuda")], (0,))
    with on_gpu_of(group, [None], None):
        run(group, [None], Staged(Alone()))
