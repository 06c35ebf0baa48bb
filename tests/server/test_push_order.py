"""The order in which a server carries out what arrived together."""

from __future__ import annotations

from paceline.server.process import Asked, first_layers_first
from paceline.wire import messages as m


def push(peer: bytes, seq: int, bucket: int) -> Asked:
    return peer, seq, m.Push("store", [m.Entry(0, bucket, 0, 4, 1)], 1.0, b"", False, True, False), ()


def order(requests: list[Asked]) -> list[tuple[bytes, int]]:
    return [(peer, seq) for peer, seq, _, _ in first_layers_first(requests)]


def test_pushes_of_the_first_layers_go_first_and_equal_ones_keep_their_order() -> None:
    arrived = [push(b"a", 1, 3), push(b"a", 2, 0), push(b"b", 1, 3), push(b"b", 2, 0)]
    assert order(arrived) == [(b"a", 2), (b"b", 2), (b"a", 1), (b"b", 1)]


def test_no_push_overtakes_another_kind_of_request() -> None:
    pull: Asked = (b"a", 2, m.Pull("store", [m.Entry(0, 3, 0, 4, 0)], False), ())
    empty: Asked = (b"b", 3, m.Push("store", [], 1.0, b"", False, True, False), ())
    assert order([push(b"a", 1, 3), pull, push(b"a", 3, 0)]) == [(b"a", 1), (b"a", 2), (b"a", 3)]
    assert order([push(b"b", 2, 3), empty, push(b"b", 4, 0)]) == [(b"b", 2), (b"b", 3), (b"b", 4)]


def test_what_comes_after_is_looked_at_when_what_came_before_is_done() -> None:
    """Who claims to be a member is one when the next message of that connection is read."""
    done: list[int] = []

    def arriving():
        yield b"a", 1, m.Claim("worker", 0, b"token"), ()
        assert done == [1]
        yield push(b"a", 2, 0)

    for _, seq, _, _ in first_layers_first(arriving()):
        done.append(seq)
    assert done == [1, 2]
