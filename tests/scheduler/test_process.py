"""The scheduler's loop, with real connections."""

from __future__ import annotations

import math
import threading
import time

import pytest

from paceline.config import Settings
from paceline.membership import Action, Membership
from paceline.net.client import Client
from paceline.net.security import Security, new_job_key
from paceline.net.sockets import SocketHub, SocketListener
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
