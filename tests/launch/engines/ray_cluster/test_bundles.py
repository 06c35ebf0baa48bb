from __future__ import annotations

import pytest

from paceline.launch import Host, JobSpec, Machine, WorkerGroup, make_plan
from paceline.launch.backends import typed_options
from paceline.launch.engines.ray_cluster.ray_backend import RayOptions, bundles


def texts(spec: JobSpec, options: RayOptions | None = None) -> list[str]:
    plan = make_plan(spec, Machine("py"), alone=True)
    return [f"{one.host}: {one}" for one in bundles(spec, plan, options or RayOptions())]


def test_every_process_has_a_bundle() -> None:
    assert texts(JobSpec(("x",), 2, 1), RayOptions(server_cpus=0.5)) == [
        "scheduler-0: CPU=0.1",
        "server-0: CPU=0.5",
        "worker-0: CPU=1",
        "worker-1: CPU=1",
    ]


def test_groups_say_what_their_bundles_need() -> None:
    new = WorkerGroup("new", 1, select={"pool": "a100"}, resources={"cpus": "4", "gpus": "0.5", "memory": "2Gi"})
    old = WorkerGroup("old", 1, select={"resource/scratch": "3"})
    assert texts(JobSpec(("x",), 0, 0, groups=(new, old))) == [
        "worker-0: CPU=4 GPU=0.5 memory=2.14748e+09 pool=a100",
        "worker-1: CPU=1 scratch=3",
    ]


def test_hosts_of_a_group_are_taken_in_turn() -> None:
    first = WorkerGroup("a", 1)
    second = WorkerGroup("b", 3, hosts=(Host("10.0.0.1"), Host("10.0.0.2")))
    found = [text.partition("node:")[2] for text in texts(JobSpec(("x",), 0, 0, groups=(first, second)))]
    assert found == ["", "10.0.0.1=0.001", "10.0.0.2=0.001", "10.0.0.1=0.001"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stratgy": "PACK"}, "did you mean 'strategy'"),
        ({"strategy": "pack"}, "is not one of PACK"),
        ({"address": "ray://h:1"}, "ray job submit"),
        ({"wait": "0"}, "above 0 seconds"),
    ],
)
def test_wrong_options_are_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        typed_options("ray", RayOptions, given)


def test_amount_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="memory='much'"):
        texts(JobSpec(("x",), 0, 0, groups=(WorkerGroup("a", 1, resources={"memory": "much"}),)))
