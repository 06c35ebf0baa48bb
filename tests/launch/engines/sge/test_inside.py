from __future__ import annotations

import pytest

from paceline.launch import JobSpec
from paceline.launch.engines.sge.inside import Slots, on_allocation, read_hostfile


def free(spec: JobSpec, *slots: tuple[str, int]) -> dict[str, int | None]:
    placed = on_allocation(spec, tuple(Slots(*one) for one in slots))
    return {host.name: host.slots for host in placed.hosts}


def test_lines_of_the_hostfile_are_hosts_with_slots() -> None:
    text = "h1 2 main.q@h1 UNDEFINED\nh2 1 main.q@h2 UNDEFINED\n"
    assert read_hostfile(text) == (Slots("h1", 2), Slots("h2", 1))


@pytest.mark.parametrize("text", ["", "h1\n", "h1 two q@h1\n"])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PE_HOSTFILE"):
        read_hostfile(text)


def test_workers_get_the_slots_that_servers_leave() -> None:
    assert free(JobSpec(("x",), 2, 2), ("h1", 2), ("h2", 1), ("h3", 1)) == {"h1": 1, "h2": 0, "h3": 1}


def test_two_lines_of_one_host_count_together() -> None:
    assert free(JobSpec(("x",), 3, 0), ("h1", 1), ("h2", 1), ("h1", 1)) == {"h1": 2, "h2": 1}


def test_servers_that_crowd_a_host_take_no_slot_from_workers() -> None:
    spec = JobSpec(("x",), 2, 3)
    assert free(spec, ("h1", 1), ("h2", 4)) == {"h1": 0, "h2": 3}
    assert free(JobSpec(("x",), 4, 1), ("h1", 1), ("h2", 3)) == {"h1": 1, "h2": 3}
