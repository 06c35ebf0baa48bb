"""The scheduler's loop, with real connections."""

from __future__ import annotations

import contextlib
import math
import resource
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.config import Settings
from paceline.membership import Action, Membership
from paceline.net.client import Client
from paceline.net.endpoints import end
from paceline.net.lifeline import Lifeline
from paceline.net.security import Security, new_job_key
from paceline.net.sockets import SocketHub, SocketListener
from paceline.scheduler import process
from paceline.scheduler.exports import Exports
from paceline.scheduler.launcher import Launcher
from paceline.scheduler.process import CHECK_INTERVAL_S, Scheduler
from paceline.wire import messages as m
from tests.browser.simulated import SimulatedMembers

TIMEOUT_S = 60.0


def test_members_are_looked_at_at_fixed_times_however_many_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(role="scheduler", job_id="j", job_key=new_job_key(), num_workers=1, num_servers=1)
    looks, tick = list[float](), Membership.tick

    def counted(membership: Membership, now: float) -> list[Action]:
        looks.append(now)
        return tick(membership, now)

    monkeypatch.setattr(Membership, "tick", counted)
    listener = SocketListener(["tcp://127.0.0.1:*"], Security.of(settings), "scheduler", watch=True)
    client = Client(SocketHub(Security.of(settings)))
    scheduler = Scheduler(settings, listener, Launcher(None, None), Exports(settings))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(scheduler.run()))
    thread.start()
    try:
        members = SimulatedMembers(1, 1)
        channels = [client.connect(listener.addresses[0], role, "scheduler") for role, _ in members.members]
        joined = [client.ask(one, members.hello(number, "j"), "joining") for number, one in enumerate(channels)]
        assert client.wait(joined, TIMEOUT_S) is None
        began, before, beats = time.monotonic(), len(looks), 0
        while time.monotonic() < began + 5 * CHECK_INTERVAL_S:
            assert client.wait([client.ask(channels[1], m.Heartbeat(0), "heartbeat")], TIMEOUT_S) is None
            beats += 1
        assert beats > 5
        assert len(looks) - before <= math.ceil((time.monotonic() - began) / CHECK_INTERVAL_S)
        assert client.wait([client.ask(one, m.Bye("", 0), "leaving") for one in reversed(channels)], TIMEOUT_S) is None
        thread.join(TIMEOUT_S)
        assert codes == [0]
    finally:
        client.close()
        listener.close()


def test_limit_of_descriptors_is_named_before_anybody_joins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 1024))
    settings = Settings(
        role="scheduler", job_id="j", job_key=new_job_key(), num_workers=600, num_servers=1,
        scheduler="tcp://127.0.0.1:0",
    )  # fmt: skip
    assert process.main(settings) == 1
    assert "the scheduler of 600 workers needs 1265 file descriptors, and may open 1024" in caplog.text


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[tuple[Scheduler, SocketListener, list[int]]]:
    """Run a scheduler in a thread; yields it, its listener, and its exit code once it has one."""
    listener = SocketListener(["tcp://127.0.0.1:*"], Security.of(settings), "scheduler", watch=True)
    scheduler = Scheduler(settings, listener, Launcher(None, None), Exports(settings))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(scheduler.run()), daemon=True)
    thread.start()
    try:
        yield scheduler, listener, codes
        thread.join(TIMEOUT_S)
    finally:
        listener.close()


def until(condition: Callable[[], object], client: Client | None = None) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        if client is None:
            time.sleep(0.05)
        else:
            client.poll(0.05)


def test_member_that_waits_for_others_to_join_is_back_with_its_first_message() -> None:
    """It sends no heartbeats yet, only asks after its answer."""
    settings = Settings(
        role="scheduler", job_id="j", job_key=new_job_key(), num_workers=1, num_servers=1, disconnect_grace_s=TIMEOUT_S
    )
    hub = SocketHub(Security.of(settings))
    client, members = Client(hub), SimulatedMembers(1, 1)
    with running(settings) as (scheduler, listener, codes):
        channels = [client.connect(listener.addresses[0], role, "scheduler") for role, _ in members.members]
        joining = client.ask(channels[0], members.hello(0, "j"), "joining")
        roster, key = scheduler._membership._roster, members.members[0]
        until(lambda: key in roster, client)

        def is_lost() -> bool:  # again where it was made again before the listener noticed
            channel = hub._channels[channels[0]]
            if channel.is_open and channel.socket is not None:
                end(channel.socket)
            return roster[key].closed_since is not None

        until(is_lost)  # without a poll nothing is sent
        until(lambda: roster[key].closed_since is None, client)
        joined = [joining, client.ask(channels[1], members.hello(1, "j"), "joining")]
        assert client.wait(joined, TIMEOUT_S) is None
        assert client.wait([client.ask(one, m.Bye("", 0), "leaving") for one in reversed(channels)], TIMEOUT_S) is None
    client.close()
    assert codes == [0]


def test_member_whose_figures_cannot_be_had_stays_in_the_job(caplog: pytest.LogCaptureFixture) -> None:
    """Such as one that has no file descriptor left, or whose accelerator answers every call with an error."""

    def fail(beat: m.Heartbeat) -> None:
        raise OSError(24, "Too many open files")

    settings = Settings(role="scheduler", job_id="j", job_key=new_job_key(), num_workers=1, num_servers=1)
    client, members = Client(SocketHub(Security.of(settings))), SimulatedMembers(1, 1)
    with running(settings) as (scheduler, listener, codes):
        address = listener.addresses[0]
        own = settings.replace(role="worker", rank=0, host="127.0.0.1", scheduler=address)
        server = next(number for number, (role, _) in enumerate(members.members) if role == "server")
        channel = client.connect(address, "server", "scheduler")
        joining = client.ask(channel, members.hello(server, "j"), "joining")
        lifeline = Lifeline(own, SocketHub(Security.of(settings)), add_figures=fail)
        lifeline.round = 7
        lifeline.join()
        assert client.wait([joining], TIMEOUT_S) is None
        record = scheduler._membership._roster["worker", 0]
        until(lambda: record.round == 7, client)
        heard = record.heard
        until(lambda: record.heard > heard, client)
        lifeline.leave()
        assert client.wait([client.ask(channel, m.Bye("", 0), "leaving")], TIMEOUT_S) is None
    client.close()
    assert codes == [0]
    lines = [one.getMessage() for one in caplog.records if "figures" in one.getMessage()]
    assert lines == ["worker 0: a heartbeat goes without figures"]
