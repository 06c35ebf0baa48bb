"""Meetings of workers at a server, and the board, without processes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import DeadlineError, PacelineError, PeerDiedError, ProtocolError
from paceline.net.call import Call
from paceline.server import meetings
from paceline.server.meetings import Meetings
from paceline.testing.one_process import OneProcess
from paceline.wire import messages as m


def ask(job: OneProcess, rank: int, body: m.Request, frames: tuple[bytes, ...] = ()) -> tuple[Call, list[Any]]:
    """Send a request; what arrives is in the list."""
    got: list[Any] = []
    call = job.session(rank).ask_server(0, body, "a meeting", frames, lambda body, found: got.extend([body, *found]))
    job.deliver_all()
    return call, got


def meet(
    number: int = 1, to: tuple[int, ...] = (), what: str = "gather", members: tuple[int, ...] = (0, 1, 2)
) -> m.Meet:
    return m.Meet("g", number, list(members), what, list(to))


def text(call: Call, kind: type[PacelineError]) -> str:
    assert call.done
    with pytest.raises(kind) as caught:
        call.raise_error()
    return str(caught.value)


def test_members_get_the_frames_for_them_when_the_last_has_come() -> None:
    job = OneProcess("aaa")
    first, got_0 = ask(job, 0, meet(to=(1, 2)), (b"to 1", b"to 2"))
    assert not first.done
    assert job.session(0).call_server(0, m.AskNotMet("g", 1, [0, 1, 2]), "asking") == m.Missing([1, 2])
    _, got_2 = ask(job, 2, meet(to=(-1,)), (b"to all",))
    _, got_1 = ask(job, 1, meet())
    assert got_0 == [m.Met([2]), b"to all"]
    assert got_1 == [m.Met([0, 2]), b"to 1", b"to all"]
    assert got_2 == [m.Met([0]), b"to 2"]
    assert job.session(0).call_server(0, m.AskNotMet("g", 1, [0, 1, 2]), "asking") == m.Missing([])


def test_unlike_operations_are_an_error_on_all_members() -> None:
    job = OneProcess("aaa")
    calls = [ask(job, 0, meet())[0], ask(job, 1, meet(what="barrier"))[0], ask(job, 2, meet())[0]]
    for call in calls:
        assert "worker 1 called barrier, but worker 0 called gather" in text(call, ProtocolError)
    assert ask(job, 0, meet(2))[0].done is False


def test_member_that_has_left_is_waited_for_no_more() -> None:
    job = OneProcess("aaa")
    first, _ = ask(job, 0, meet())
    job.services[0].take_out(frozenset([2]))
    later, _ = ask(job, 1, meet())
    for call in (first, later):
        assert "worker 2 left the job before gather" in text(call, PeerDiedError)


def test_member_that_gives_up_leaves_no_frames_and_all_members_learn_it() -> None:
    job = OneProcess("aaa")
    first, _ = ask(job, 0, meet(to=(-1,)), (bytes(1000),))
    second, _ = ask(job, 1, meet(to=(-1,)), (bytes(1000),))
    other, _ = ask(job, 1, meet(2, to=(-1,)), (bytes(1000),))
    ask(job, 0, m.GiveUp("g"))
    later, _ = ask(job, 2, meet())
    for call in (first, second, later):
        said = text(call, DeadlineError)
        assert "worker 0 waits no more in gather of group 'g': its deadline passed before worker 2 came" in said
    assert not other.done
    ask(job, 0, m.GiveUp("g"))
    ask(job, 2, m.GiveUp("another group"))
    assert not other.done
    ask(job, 1, m.GiveUp("g"))
    frames = [
        one.frames for group in job.services[0].meetings._groups.values() for one in group[(0, 1, 2), 2].came.values()
    ]
    assert frames == [()]


def test_meetings_that_failed_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "MAX_FAILED", 2)
    job = OneProcess("aaa")
    for number in range(5):
        ask(job, 0, meet(number))
        ask(job, 0, m.GiveUp("g"))
    assert [number for _, number in job.services[0].meetings._groups["g"]] == [3, 4]
    for rank in (1, 2):
        call, _ = ask(job, rank, meet(4))
        assert "waits no more" in text(call, DeadlineError)


def test_taker_that_gives_up_takes_nothing_any_more() -> None:
    job = OneProcess("aaa")
    taker, _ = ask(job, 0, m.TakeAny("g"))
    _, got = ask(job, 1, m.TakeAny("g"))
    ask(job, 0, m.GiveUp("g"))
    assert "waits no more" in text(taker, DeadlineError)
    sent, _ = ask(job, 2, meet(members=(2, 0), to=(0,)), (b"for 0",))
    assert not sent.done
    ask(job, 2, meet(members=(2, 1), to=(1,)), (b"for 1",))
    assert got == [m.Met([2]), b"for 1"]


@pytest.mark.parametrize("body", [meet(members=(1, 2)), meet(to=(1,)), meet(members=(0, 0)), meet(members=(0, 3))])
def test_stranger_and_message_without_its_frames_are_refused(body: m.Meet) -> None:
    call, _ = ask(OneProcess("aaa"), 0, body)
    assert "worker 0 cannot meet" in text(call, ProtocolError)


@pytest.mark.parametrize("taker_is_first", [True, False])
def test_taker_gets_what_any_other_worker_sends(taker_is_first: bool) -> None:
    job = OneProcess("aaa")
    _, got = ask(job, 1, m.TakeAny("g")) if taker_is_first else (None, [])
    sent, _ = ask(job, 2, meet(members=(2, 1), to=(1,)), (b"hello",))
    if not taker_is_first:
        assert not sent.done
        _, got = ask(job, 1, m.TakeAny("g"))
    assert got == [m.Met([2]), b"hello"]
    assert sent.done


def test_board_answers_who_waits_for_a_name() -> None:
    job = OneProcess("aa")
    waiting, got = ask(job, 0, m.UseBoard("get", ["a", "b"], []))
    ask(job, 1, m.UseBoard("set", ["a"], [b"x"]))
    assert not waiting.done
    _, after = ask(job, 1, m.UseBoard("swap", ["b"], [b"", b"y"]))
    assert [one.values for one in (*got, *after)] == [[b"x", b"y"], [b"y"]]


def test_who_gives_up_waits_at_the_board_no_more() -> None:
    job = OneProcess("aa")
    waiting = [ask(job, rank, m.UseBoard("get", [name], []))[0] for rank, name in ((0, "a"), (0, "b"), (1, "a"))]
    ask(job, 0, m.UseBoard("forget", ["a"], []))
    assert "waits no more for 1 names" in text(waiting[0], DeadlineError)
    ask(job, 1, m.UseBoard("set", ["a", "b"], [b"x", b"y"]))
    assert [call.done for call in waiting] == [True, True, True]


def test_board_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "MAX_BOARD_BYTES", 100)
    monkeypatch.setattr(meetings, "MAX_GATHER_BYTES", 60)
    monkeypatch.setattr(meetings, "MAX_BOARD_WAITS", 2)
    job = OneProcess("aa")
    _, large = ask(job, 0, m.UseBoard("set", ["a"], [bytes(49)]))
    assert large == [m.BoardIs([])]
    assert "51 bytes more" in text(ask(job, 0, m.UseBoard("set", ["b"], [bytes(50)]))[0], ProtocolError)
    assert "98 bytes in one answer" in text(ask(job, 0, m.UseBoard("get", ["a", "a"], []))[0], ProtocolError)
    waits = [ask(job, 0, m.UseBoard("get", names, []))[0] for names in (["a", "b", "b", "b"], ["c"])]
    assert "2 requests of worker 0 wait" in text(ask(job, 0, m.UseBoard("get", ["d"], []))[0], ProtocolError)
    assert not ask(job, 1, m.UseBoard("get", ["d"], []))[0].done
    _, did = ask(job, 1, m.UseBoard("set", ["b"], [bytes(10)]))
    assert did == [m.BoardIs([])], "the answer that is too large is an error of who waits"
    assert "79 bytes in one answer" in text(waits[0], ProtocolError)
    ask(job, 0, m.UseBoard("delete", ["a"], []))
    assert ask(job, 0, m.UseBoard("set", ["e"], [bytes(88)]))[0].error is None


def test_board_counts_swaps_and_deletes() -> None:
    board = OneProcess("a").session(0)

    def use(verb: str, *values: bytes) -> tuple[list[bytes], int]:
        found = board.call_server(0, m.UseBoard(verb, [] if verb == "count" else ["n"], list(values)), verb)
        assert isinstance(found, m.BoardIs)
        return found.values, found.number

    assert use("check") == ([], 0)
    assert use("add", b"3") == ([], 3)
    assert use("add", b"-1") == ([], 2)
    assert use("swap", b"7", b"8") == ([b"2"], 0)
    assert use("swap", b"2", b"8") == ([b"8"], 0)
    assert use("check") == use("count") == ([], 1)
    assert use("delete") == ([], 1)
    assert use("swap", b"7", b"8") == ([b"7"], 0)
    with pytest.raises(ProtocolError, match="no 'sing' with 0 values"):
        use("sing")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (m.UseBoard("add", [], [b"1"]), "no 'add' with 1 values for 0 names"),
        (m.UseBoard("add", ["a", "b"], [b"1"]), "no 'add' with 1 values for 2 names"),
        (m.UseBoard("swap", [], [b"", b"x"]), "no 'swap' with 2 values for 0 names"),
        (m.UseBoard("add", ["a"], [b"many"]), "b'many' is none"),
        (m.UseBoard("add", ["text"], [b"1"]), "b'hello' is none"),
    ],
)
def test_board_refuses_requests_without_their_names_and_numbers(body: m.UseBoard, reason: str) -> None:
    job = OneProcess("a")
    ask(job, 0, m.UseBoard("set", ["text"], [b"hello"]))
    call, _ = ask(job, 0, body)
    assert reason in text(call, ProtocolError)
    count = job.session(0).call_server(0, m.UseBoard("count", [], []), "count")
    assert count == m.BoardIs([], 1)


def test_groups_leave_nothing_behind() -> None:
    job = OneProcess("aa")
    meetings = job.services[0].meetings
    for group in ("one", "other"):
        ask(job, 0, m.TakeAny(group))
        ask(job, 1, m.Meet(group, 1, [1, 0], "send and recv", [0]), (b"x",))
        for rank in range(2):
            ask(job, rank, m.Meet(group, 2, [0, 1], "barrier", []))
        assert job.session(0).call_server(0, m.AskNotMet(group, 3, [0, 1]), "asking") == m.Missing([])
    assert vars(meetings) == vars(Meetings(2))


def test_takers_of_a_group_are_served_in_their_order() -> None:
    job = OneProcess("aaa")
    first, second = ask(job, 0, m.TakeAny("g"))[1], ask(job, 0, m.TakeAny("g"))[1]
    for rank, frame in ((1, b"one"), (2, b"two")):
        ask(job, rank, m.Meet("g", 1, [rank, 0], "send and recv", [0]), (frame,))
    assert first == [m.Met([1]), b"one"]
    assert second == [m.Met([2]), b"two"]
