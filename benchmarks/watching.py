"""Processor time of a scheduler that serves the page of a job of 100 members.

    python -m benchmarks.watching

The scheduler is a process of its own, with the page, figures for Prometheus and a browser's connection that takes the
news. The members are simulated: each has an authenticated connection. Their rounds take half a second, and each sends
heartbeats with the account of the rounds since the last one as often as real ones do in a job of so many
(``Settings.beat_interval_s``), in the turn of its rank, and by chance up to ``--late`` later: threads wake late, and
clocks are not quite known. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request

import psutil

from paceline.config import Settings, variable
from paceline.launch.supervise.crew import free_port
from paceline.net.client import Client
from paceline.net.security import Security, new_job_key
from paceline.net.sockets import SocketHub
from paceline.observe.clocks import RoundTrips
from tests.browser.simulated import SimulatedMembers

ROUND_S, START_TIMEOUT_S = 0.5, 60.0


class WatchedScheduler:
    """A scheduler process, its members, and a reader of its page. Use as a context manager."""

    def __init__(self, workers: int, servers: int, dashboard: bool, late_s: float) -> None:
        self._members, self._late_s, self._random = SimulatedMembers(workers, servers), late_s, random.Random(4)
        address = f"tcp://127.0.0.1:{free_port()}"
        key = new_job_key()
        values = {"job_id": "watched", "scheduler": address, "job_key": key, "num_workers": workers,
                  "num_servers": servers, "metrics": "0", "dashboard": "0" if dashboard else ""}  # fmt: skip
        environment = {variable(name): str(value) for name, value in values.items() if value != ""}
        command = [sys.executable, "-m", "paceline", "scheduler"]
        self._process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
        self._url = self._page() if dashboard else ""
        settings = Settings(job_id="watched", job_key=key, num_workers=workers, num_servers=servers)
        self._interval_s = settings.beat_interval_s
        self._client = Client(SocketHub(Security.of(settings)))
        self._channels = [self._client.connect(address, role, "scheduler") for role, _ in self._members.members]
        self.news = 0

    def _page(self) -> str:
        for line in self._process.stderr or ():
            if found := re.search(r"page of this job: (\S+)", line):
                return found[1]
        raise RuntimeError("the scheduler has named no page")

    def __enter__(self) -> WatchedScheduler:
        threading.Thread(target=lambda: [None for _ in self._process.stderr or ()], daemon=True).start()
        hellos = [
            self._client.ask(channel, self._members.hello(number, "watched"), "joining")
            for number, channel in enumerate(self._channels)
        ]
        late = self._client.wait(hellos, START_TIMEOUT_S)
        if late is not None:
            raise RuntimeError(f"a simulated member could not join: {late}")
        if self._url:
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        with urllib.request.urlopen(self._url.replace("/?", "/events?")) as events:
            for line in events:
                self.news += line.startswith(b"data:")

    def beat(self, seconds: float) -> dict[str, float]:
        """Send heartbeats for so long; returns the scheduler's processor time per second, and the news of the page."""
        process, news = psutil.Process(self._process.pid), self.news
        before, began = process.cpu_times(), time.monotonic()
        turn, rounds = began, max(1, round(self._interval_s / ROUND_S))
        clock = RoundTrips(is_same_clock=True)
        while time.monotonic() < began + seconds:
            self._members.round += rounds
            asked = []
            for due, number in sorted(
                (clock.next_turn(turn, self._interval_s, rank) + self._random.uniform(0, self._late_s), number)
                for number, (_, rank) in enumerate(self._members.members)
            ):
                self._poll_until(due)
                beat = self._members.beat(*self._members.members[number], rounds)
                asked.append(self._client.ask(self._channels[number], beat, "heartbeat"))
            turn += self._interval_s
            self._client.wait(asked, START_TIMEOUT_S)
            self._poll_until(turn)
        after, took_s = process.cpu_times(), time.monotonic() - began
        user, system = (after.user - before.user) / took_s, (after.system - before.system) / took_s
        return {"share_of_a_core": round(user + system, 4), "kernel": round(system, 4), "news": self.news - news,
                "heartbeats_per_s": round(len(asked) / self._interval_s)}  # fmt: skip

    def _poll_until(self, due: float) -> None:
        while (left_s := due - time.monotonic()) > 0:
            self._client.poll(left_s)

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._process.kill()
        self._process.wait()


def measure(
    workers: int, servers: int, dashboard: bool, late_s: float, warm_up_s: float, seconds: float
) -> dict[str, float]:
    """Return the scheduler's processor time per second, and the news that a page got."""
    with WatchedScheduler(workers, servers, dashboard, late_s) as job:
        job.beat(warm_up_s)
        return job.beat(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=96)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--late", type=float, default=0.01, help="seconds that a heartbeat is late at most (0.01)")
    parser.add_argument("--warm-up", type=float, default=25.0, help="seconds that are not measured (25)")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    found = {
        name: measure(args.workers, args.servers, has_page, args.late, args.warm_up, args.seconds)
        for name, has_page in (("page", True), ("no page", False))
    }
    for name, one in found.items():
        share, kernel = one["share_of_a_core"], one["kernel"]
        print(f"{name:8} {share:.1%} of a core, {kernel:.1%} in the kernel, {one['news']:.0f} pieces of news")
    print(json.dumps({"work": vars(args), **found}))


if __name__ == "__main__":
    main()
