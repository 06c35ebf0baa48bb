"""The log of a job's membership."""

from __future__ import annotations

from paceline.membership.log import MembershipLog
from paceline.wire import messages as m
from tests.membership.test_losses import THREE, confirm, dead
from tests.membership.test_machine import answers, joined


def kinds(members: object) -> list[tuple[int, str, list[int], int]]:
    assert hasattr(members, "log")
    return [(one.generation, one.kind, one.workers, one.round) for one in members.log.take()]


def test_every_change_has_the_next_number_whatever_its_kind() -> None:
    members = joined(THREE)
    members.handle(b"worker-0", 2, m.Heartbeat(5), 0.5)

    def take(worker: int, number: int, walk: int, done: int, round: int, epoch: int = 0) -> m.PoolSamples:
        body = m.TakeSamples("p", 2, number, walk, 2, done, round, epoch)
        sent = answers(members.handle(b"worker-%d" % worker, 3 + number, body, 0.5))
        found = next(one for peer, _, one in sent if peer == b"worker-%d" % worker)
        assert isinstance(found, m.PoolSamples)
        return found

    assert take(0, 1, 0, 0, 0).phase == 0
    assert take(0, 2, 0, 1, 1).over
    dead(members)
    confirm(members, 0, 3)
    confirm(members, 1, 4)
    assert take(0, 3, 1, 2, 1, 1).phase == 2, "the next epoch of a pool begins in the generation after the death"
    members.handle(b"worker-2", 50, m.Bye("", 6), 3.0)
    assert kinds(members) == [
        (0, "starts", [0, 1, 2], 0),
        (1, "died", [1], 4),
        (2, "walks", [], 0),
        (3, "left", [2], 6),
    ]
    assert kinds(members) == []
    status = members.status(5.0)
    assert [one.generation for one in status.changes] == [0, 1, 2, 3]
    assert status.changes[-1].ago_s == 2.0


def test_groups_have_the_number_of_the_change_in_which_they_came() -> None:
    log = MembershipLog()
    log.add("starts", [0, 1, 2])
    assert log.groups == (0, [])
    log.add("left", [1], 4)
    log.regroup([[0], [2]], 7)
    assert log.groups == (2, [[0], [2]])
    assert log.generation == 2


def test_words_on_samples_that_several_workers_say_count_once() -> None:
    log = MembershipLog()
    words = [m.Dealt("s", round, 0, 8, 0, True, 0, 4, [(0, 0, 2), (1, 2, 4)]) for round in range(1, 5000)]
    log.note_dealt(words)
    log.note_dealt(words[-2:])
    assert log.take() == words


def test_all_workers_hear_of_new_groups_with_the_number_of_the_change() -> None:
    class Following:
        groups: tuple[int, list[list[int]]] = (0, [])

        def check(self, workers: object) -> str:
            Following.groups = (1, [[0], [1, 2]])
            return "the workers' speeds have changed"

    members = joined(THREE)
    members.advice.following = Following()  # type: ignore[assignment]
    members.log.add("walks", [], why="epoch 1 of pool 'p'")
    told = answers(members.handle(b"worker-0", 2, m.Heartbeat(5), 0.5))
    news = [body for _, seq, body in told if isinstance(body, m.News) and not seq]
    assert [(one.generation, one.groups) for one in news] == 3 * [(2, [[0], [1, 2]])]
    assert kinds(members)[-1] == (2, "regroups", [0, 1, 2], 0)
