"""Server and scheduler take a flood of broken messages from whoever holds the job key, and serve on as if nothing was.

``PACELINE_FUZZ_MESSAGES=1000000 pytest tests/integration/test_fuzz.py`` sends a million, in some minutes.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
import pytest
import torch

from paceline import kvstore
from paceline.config import Settings
from paceline.errors import ProtocolError
from paceline.kvstore.dist import DistStore
from paceline.net import Security
from paceline.net.claims import UNCLAIMED_BYTES
from paceline.net.client import identity
from paceline.net.memory import SharedTensor
from paceline.net.sockets import SocketHub
from paceline.server.requests import OF_SERVERS, OF_WORKERS
from paceline.testing import LocalJob, listen, tell
from paceline.wire import decode, decode_request, encode
from paceline.wire import messages as m
from paceline.worker.session import Session
from tests.integration.fuzzed import MUTATIONS, NUMEL, Frames, valid_messages

MESSAGES = int(os.environ.get("PACELINE_FUZZ_MESSAGES", "100000"))
BURST = 1000
GROWTH_BYTES = 64 * 2**20
STORE = "fuzz"

pytestmark = pytest.mark.timeout(300 + MESSAGES // 500)


# ---- the attacker ----------------------------------------------------------------------------------------------------


class Flood:
    """Sends messages to a listener over a connection that holds the job key.

    Args:
        settings: of the job.
        name: role and rank of the listener.
        address: where it listens.
        member: whom to claim to be; None for a stranger.
    """

    def __init__(self, settings: Settings, name: str, address: str, member: m.Member | None) -> None:
        self._security, self._member = Security.of(settings), member
        self._name, self._address = name, address.split()[0]  # a server listens at several
        self.answers: Counter[str] = Counter()
        self._seq = 0

    def __enter__(self) -> Self:
        self._hub = SocketHub(self._security)
        self._channel = self._hub.connect(self._address, identity("fuzz"), self._name, bulk=True)
        if self._member is not None:
            self.send(m.Claim("worker", self._member.rank, self._member.token), [])
            self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self._hub.close()

    def send(self, body: m.Body, frames: Sequence[Any], change: Callable[[Frames], Frames] = lambda one: one) -> None:
        self._seq += 1
        made = change([encode(self._seq, self._seq - 1, body), *frames])
        if self._member is None and sum(map(len, made)) > UNCLAIMED_BYTES:  # the connection would end
            return
        if self._member is not None and _ends_the_job(made):
            return
        self._hub.send(self._channel, made)

    def settle(self, timeout_s: float = 200.0) -> None:
        """Wait until all that was sent so far is taken, and its answers have come."""
        self._seq += 1
        asked = self._seq
        self._hub.send(self._channel, [encode(asked, 0, m.Probe([2**62]))])
        deadline, is_taken = time.monotonic() + timeout_s, False
        while time.monotonic() < deadline:
            arrived = self._hub.receive(0.2 if is_taken else 1.0)
            if self._hub.reopened():  # as of a stranger that leaves large answers unread
                self._hub.send(self._channel, [encode(asked, 0, m.Probe([2**62]))])
            if is_taken and not arrived:
                return
            for _, frames in arrived:
                envelope, _ = decode(frames)
                self.answers[type(envelope.body).__name__] += 1
                is_taken |= isinstance(envelope.body, m.Unknown) and envelope.seq == asked
        raise TimeoutError(f"{self._name} does not answer any more")


def _ends_the_job(frames: Frames) -> bool:
    """Return whether a message is one by which a member may end the job, or say that another one is dead."""
    try:
        body = decode_request(frames)[0].body
    except ProtocolError:
        return False
    return isinstance(body, m.Bye) or (isinstance(body, m.Heartbeat) and any(one.rank < 3 for one in body.seen))


def flood(
    session: Session, name: str, member: m.Member | None, store: str, count: int, rng: random.Random
) -> dict[str, int]:
    """Send mutated messages in bursts, each on a new connection; return how many answers of which kind came."""
    address = session.servers[0].address if name == "server 0" else session.settings.scheduler
    shared = [SharedTensor(NUMEL, torch.float32) for _ in range(2)]
    answers: Counter[str] = Counter()
    # A stranger claims to be worker 0, whose token only worker 0 and the servers know.
    messages = valid_messages(store, member or session.workers[0], shared)
    for _ in range(0, count, BURST):
        with Flood(session.settings, name, address, member) as attacker:
            for _ in range(BURST):
                body, frames = rng.choice(messages)
                if isinstance(body, m.Push) and rng.random() < 0.5:
                    entries = [msgspec.structs.replace(one, round=rng.randint(1, 50)) for one in body.entries]
                    body = msgspec.structs.replace(body, entries=entries)
                mutation = rng.choice(MUTATIONS)
                attacker.send(body, frames, lambda frames, mutation=mutation: mutation(rng, frames))  # type: ignore[misc]
            attacker.settle()
            answers += attacker.answers
    return dict(answers)


def send_valid_ones(session: Session, name: str, member: m.Member) -> dict[str, int]:
    """Send every message once as it is: code and libraries that they need are loaded before memory is measured."""
    shared = [SharedTensor(NUMEL, torch.float32) for _ in range(2)]
    address = session.servers[0].address if name == "server 0" else session.settings.scheduler
    with Flood(session.settings, name, address, member) as one:
        for body, frames in valid_messages(STORE, member, shared):
            one.send(body, frames)
        one.settle()
        return dict(one.answers)


# ---- what runs in the workers ----------------------------------------------------------------------------------------


def witness() -> list[float]:
    """Train a round before and a round after."""
    store = new_store()
    found = [one_round(store)]
    tell("trained")
    listen(900)
    value = torch.zeros(100)
    store.pull("w", value)
    found += [value[0].item(), store.stats()["updates"], one_round(store)]
    return found


def attack(count: int) -> dict[str, dict[str, int]]:
    """Leave the training to the others and flood server and scheduler: as a stranger, and as this worker."""
    store = new_store()
    store.close()
    session, found = store.session, {}
    member = session._lifeline.me
    for name in ("server 0", "scheduler"):
        found[f"valid {name}"] = send_valid_ones(session, name, member)
    tell("ready")
    listen()
    rng = random.Random(20260)
    for name in ("server 0", "scheduler"):
        # What the stranger sends names the store that the witness trains.
        found[f"stranger {name}"] = flood(session, name, None, store.name, count // 4, rng)
        found[f"claimed {name}"] = flood(session, name, member, STORE, count // 4, rng)
    tell("done")
    return found


def new_store() -> DistStore:
    store = kvstore.create("dist_sync")
    assert isinstance(store, DistStore)
    store.set_updater("add")
    store.init("w", torch.zeros(100))
    return store


def one_round(store: DistStore) -> float:
    value = torch.ones(100)
    store.pushpull("w", value)
    return value[0].item()


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with LocalJob(3, 1, timeout_s=60, log_level="ERROR") as job:
        good, bad = [job.start(rank, witness) for rank in (0, 1)], job.start(2, attack, MESSAGES)
        assert [worker.heard() for worker in (*good, bad)] == ["trained", "trained", "ready"]
        roles = {"server": job.servers[0], "scheduler": job.scheduler}
        before = {name: one.rss_bytes() for name, one in roles.items()}
        bad.tell("go")
        assert bad.heard(max(280.0, MESSAGES / 500)) == "done", job.report()
        grown = {name: one.rss_bytes() - before[name] for name, one in roles.items()}
        for worker in good:
            worker.tell("go on")
        seen = [worker.result() for worker in good]
        codes = {name: one.wait(30) for name, one in roles.items()}
        outputs = {name: one.output for name, one in roles.items()}
        return {"good": seen, "bad": bad.result(), "grown": grown, "codes": codes, "outputs": outputs}


def test_every_kind_of_request_is_among_the_messages() -> None:
    shared = [SharedTensor(NUMEL, torch.float32) for _ in range(2)]
    member = m.Member("worker", 2, 0, "h", "i", 1, "", b"token")
    kinds = {type(body) for body, _ in valid_messages(STORE, member, shared)}
    assert set(m.REQUESTS) <= kinds
    assert OF_WORKERS.keys() | OF_SERVERS.keys() <= kinds


def test_the_server_still_serves_a_round(found: dict[str, Any]) -> None:
    assert [seen[-1] for seen in found["good"]] == [4.0, 4.0]
    assert found["codes"]["server"] == 0


def test_the_scheduler_still_ends_the_job(found: dict[str, Any]) -> None:
    assert found["codes"]["scheduler"] == 0


def test_no_request_meets_a_defect(found: dict[str, Any]) -> None:
    """An update may fail: a member can set half of an optimizer's state."""
    for text in found["outputs"].values():
        assert not re.search(r"a \w+ of peer .* failed", text), text


def test_nothing_reached_the_state(found: dict[str, Any]) -> None:
    assert [seen[:3] for seen in found["good"]] == [[2.0, 2.0, 1.0]] * 2


def test_memory_grows_by_less_than_64_mib(found: dict[str, Any]) -> None:
    assert max(found["grown"].values()) < GROWTH_BYTES, found["grown"]


def test_strangers_are_answered_with_refusals_only(found: dict[str, Any]) -> None:
    assert set(found["bad"]["stranger server 0"]) <= {"Failed", "Unknown", "Done"}
    assert set(found["bad"]["stranger scheduler"]) <= {"Failed", "Unknown", "Done", "Status", "TraceIs"}
    for name in ("server 0", "scheduler"):
        assert found["bad"][f"stranger {name}"]["Failed"] > MESSAGES // 20


def test_messages_of_a_worker_reach_all_parts(found: dict[str, Any]) -> None:
    wanted = {
        "server 0": {"Done", "Values", "StateIs", "CommandAnswer", "StatsAre", "Missing", "Met", "BoardIs", "ValuesAt"},
        "scheduler": {"Done", "News", "Status", "Found", "Missing", "PoolSamples", "SamplesLeft", "TraceIs"},
    }
    for name, kinds in wanted.items():
        assert kinds | {"Failed", "Unknown"} <= set(found["bad"][f"valid {name}"])
        assert kinds | {"Failed", "Unknown"} <= set(found["bad"][f"claimed {name}"])
