"""Where local merge takes place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.layout.local_merge import LocalMerge

hosts = st.lists(st.sampled_from("abc"), min_size=1, max_size=6)


def test_workers_of_one_host_push_through_its_server_what_others_own() -> None:
    merge = LocalMerge("aabb", "ab", [0, 0, 0, 0])
    assert [merge.via(worker, 1) for worker in range(4)] == [0, 0, 1, 1]
    assert [merge.via(worker, 0) for worker in range(4)] == [0, 0, 1, 1]
    assert merge.forwarded_by(0, 1) == [1]
    assert merge.forwarded_by(0, 2) == []


def test_who_steps_alone_or_has_no_server_on_its_host_pushes_to_the_owner() -> None:
    merge = LocalMerge("aabbc", "ac", [0, 1, 0, 0, 0])
    assert [merge.via(worker, 1) for worker in range(5)] == [1, 1, 1, 1, 1]
    assert [merge.local_unit(worker) for worker in range(5)] == [(0,), (1,), (2, 3), (2, 3), (4,)]


def test_owners_are_spread_over_the_servers_of_a_host() -> None:
    merge = LocalMerge("aa", "aabbb", [0, 0])
    assert [merge.via(0, owner) for owner in range(5)] == [0, 1, 0, 1, 0]
    assert merge.forwarded_by(0, 1) == [2, 4]


@given(workers=hosts, servers=hosts, data=st.data())
def test_mates_push_through_the_same_server_of_their_host(
    workers: list[str], servers: list[str], data: st.DataObject
) -> None:
    units = [data.draw(st.integers(0, 2)) for _ in workers]
    merge = LocalMerge(workers, servers, units)
    for worker in range(len(workers)):
        for owner in range(len(servers)):
            via = merge.via(worker, owner)
            assert {merge.via(other, owner) for other in merge.local_unit(worker)} == {via}
            assert via == owner or (servers[via] == workers[worker] != servers[owner])
            assert (owner in merge.forwarded_by(via, worker)) == (via != owner)
