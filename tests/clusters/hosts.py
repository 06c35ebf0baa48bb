"""Several hosts on this machine: network namespaces joined by cables, with a rate, and plugs that can be pulled.

A namespace here has no name: it is held by a process that ends with the one that made it, so nothing is left behind
however a test ends, and tests can run side by side. To paceline each namespace is a host of its own: no shared memory
and no unix sockets between them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline import config
from paceline.testing import Faults, LocalJob

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_INTERFACE = "eth0"

#: Addresses of each private network.
_ROUTER, _BEHIND_ROUTER = "192.168.77.1", "192.168.77.2"

#: A token bucket passes this much at once: below two of the 64 KiB packets of TCP's offload the rate is not reached.
_BURST_BYTES, _BURST_S = 128 * 1024, 1e-3
#: How long a packet may wait in the bucket's queue before it is dropped: a switch with deep buffers.
_QUEUE_S = 20e-3
#: Below this rate TCP's offload is off, and packets are those of a cable. A switch drops single packets; a short queue
#: that drops 64 KiB of one connection at once makes that one alone slow.
_OFFLOAD_BITS_S = 5e8


@functools.cache
def why_no_hosts() -> str:
    """Return why hosts cannot be made on this machine, for skipping tests; an empty text when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"network namespaces need {', '.join(absent)} (packages iproute2 and util-linux)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class StepwiseStart(ABC):
    """A context that starts something in steps. What has been started ends at the exit, and when a step fails."""

    @abstractmethod
    def _open(self, stack: contextlib.ExitStack) -> None:
        """Start everything; ``stack`` ends it."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Counters:
    """Bytes that crossed a host's plug, with headers down to Ethernet's, as far as the kernel has made packets of them.

    A packet of TCP's segmentation offload counts once, with one header.
    """

    sent: int
    received: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.sent - earlier.sent, self.received - earlier.received)


class _Namespace:
    """A network namespace, for as long as a process in it waits for the end of its input."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(b"there?\n")
        self._holder.stdin.flush()
        if not self._holder.stdout.readline():
            self.close()
            raise OSError("a network namespace could not be made; ask why_no_hosts()")
        self.pid = self._holder.pid

    def command(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *argv]

    def run(self, command: str) -> None:
        done = subprocess.run(self.command(command.split()), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"`{command}` failed in a network namespace: {done.stderr.strip()}")

    def close(self) -> None:
        self._holder.communicate()


class NamespaceHost:
    """One host: where processes can be started, and its plug.

    Args:
        namespace: it is.
        address: it has.

    Attributes:
        address: IPv4 address by which the other hosts reach it.
    """

    def __init__(self, namespace: _Namespace, address: str) -> None:
        self._namespace = namespace
        self.address = address

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on this host. The process keeps its id; all else is inherited."""
        return self._namespace.command(argv)

    def run(self, command: str) -> None:
        """Run a command of words without blanks, such as ``ip link set eth0 mtu 9000``, and wait for its end.

        Raises:
            OSError: it failed; with what it wrote.
        """
        self._namespace.run(command)

    def counters(self) -> Counters:
        """Return the bytes that have crossed the plug so far."""
        lines = Path(f"/proc/{self._namespace.pid}/net/dev").read_text().splitlines()
        words = next(line for line in lines if line.strip().startswith(f"{_INTERFACE}:")).split(":")[1].split()
        return Counters(sent=int(words[8]), received=int(words[0]))

    def unplug(self) -> None:
        """Pull the plug: nothing is sent or received, and no connection learns of it."""
        self.run(f"ip link set {_INTERFACE} down")

    def plug(self) -> None:
        """Put the plug back."""
        self.run(f"ip link set {_INTERFACE} up")


class Hosts(StepwiseStart):
    """Hosts in one network: two at the ends of a cable, more around a switch. ::

        with Hosts(2, rate_bits_s=1e9) as hosts:
            subprocess.run(hosts[0].command(["ping", "-c", "1", hosts[1].address]))

    Args:
        count: of hosts.
        rate_bits_s: what a cable carries in each direction; None: as fast as the machine is.
        masked: hosts that are each behind a router of their own, which gives their connections its address. All of
            them have the same private address.
    """

    def __init__(self, count: int = 2, *, rate_bits_s: float | None = None, masked: Collection[int] = ()) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"{count} hosts; 1 to 200 are possible")
        self._count, self._rate_bits_s, self._masked = count, rate_bits_s, masked
        self._hosts: list[NamespaceHost] = []

    def _open(self, stack: contextlib.ExitStack) -> None:
        namespaces = [_closing(stack, _Namespace()) for _ in range(self._count)]
        self._hosts = [NamespaceHost(one, f"10.77.0.{index + 1}") for index, one in enumerate(namespaces)]
        ends = [_closing(stack, _Namespace()) if one in self._masked else end for one, end in enumerate(namespaces)]
        if self._count == 2:
            self._join_directly(ends)
        else:
            self._join_by_switch(_closing(stack, _Namespace()), ends)
        for host, end in zip(self._hosts, ends, strict=True):
            host.run("ip link set lo up")
            end.run(f"ip addr add {host.address}/24 dev {_INTERFACE}")
            end.run(f"ip link set {_INTERFACE} up")
        for index in self._masked:
            self._hosts[index] = self._mask(namespaces[index], ends[index])

    @staticmethod
    def _mask(inside: _Namespace, router: _Namespace) -> NamespaceHost:
        """Put a host behind a router that has an address in the network."""
        router.run(f"ip link add name inside type veth peer name {_INTERFACE} netns {inside.pid}")
        router.run(f"ip addr add {_ROUTER}/24 dev inside")
        router.run("ip link set inside up")
        router.run("sysctl -qw net.ipv4.ip_forward=1")
        router.run(f"iptables -t nat -A POSTROUTING -o {_INTERFACE} -j MASQUERADE")
        inside.run(f"ip addr add {_BEHIND_ROUTER}/24 dev {_INTERFACE}")
        host = NamespaceHost(inside, _BEHIND_ROUTER)
        host.plug()
        host.run(f"ip route add default via {_ROUTER}")
        return host

    def _join_directly(self, ends: Sequence[_Namespace]) -> None:
        ends[0].run(f"ip link add name {_INTERFACE} type veth peer name {_INTERFACE} netns {ends[1].pid}")
        for end in ends:
            self._limit(end, _INTERFACE)

    def _join_by_switch(self, switch: _Namespace, ends: Sequence[_Namespace]) -> None:
        switch.run("ip link add name switch type bridge")
        switch.run("ip link set switch up")
        for index, end in enumerate(ends):
            switch.run(f"ip link add name port{index} type veth peer name {_INTERFACE} netns {end.pid}")
            switch.run(f"ip link set port{index} master switch up")
            self._limit(switch, f"port{index}")
            self._limit(end, _INTERFACE)

    def _limit(self, namespace: _Namespace, interface: str) -> None:
        """Limit what leaves an interface; both ends of a cable make both directions."""
        if self._rate_bits_s is not None:
            rate, burst = self._rate_bits_s, max(_BURST_BYTES, self._rate_bits_s / 8 * _BURST_S)
            queue_us = _QUEUE_S * 1e6
            namespace.run(
                f"tc qdisc add dev {interface} root tbf rate {rate:.0f}bit burst {burst:.0f}b latency {queue_us:.0f}us"
            )
            if rate < _OFFLOAD_BITS_S:
                namespace.run(f"ip link set dev {interface} gso_max_segs 1")

    def __getitem__(self, index: int) -> NamespaceHost:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[NamespaceHost]:
        return iter(self._hosts)


def _closing(stack: contextlib.ExitStack, namespace: _Namespace) -> _Namespace:
    stack.callback(namespace.close)
    return namespace


class HostsJob(LocalJob):
    """A :class:`~paceline.testing.LocalJob` whose processes are spread over hosts; the scheduler is on the first. ::

        with Hosts(2) as hosts, HostsJob(hosts, workers=[1, 1], servers=[1, 1]) as job:
            losses = job.run(train, "adam", 50)

    Args:
        hosts: where the processes run.
        workers: how many on each host; ranks count host by host.
        servers: how many on each host.
        environment: further variables for all processes.
        faults: of the network and the processes.
        **settings: fields of :class:`paceline.config.Settings` for all processes; ``check_rules`` is on by default.
    """

    def __init__(
        self,
        hosts: Hosts,
        workers: Sequence[int] = (1, 1),
        servers: Sequence[int] = (1, 0),
        *,
        environment: Mapping[str, str] | None = None,
        faults: Faults | None = None,
        **settings: Any,
    ) -> None:
        for role, numbers in (("workers", workers), ("servers", servers)):
            if len(numbers) != len(hosts):
                raise ValueError(f"{role}={list(numbers)} has {len(numbers)} numbers for {len(hosts)} hosts")
        super().__init__(sum(workers), sum(servers), environment=environment, faults=faults, **settings)
        self._scheduler_host = hosts[0].address
        self._places = {("scheduler", 0): (hosts[0], 0)}
        self._places |= _places("worker", workers, hosts) | _places("server", servers, hosts)

    def host_of(self, role: str, rank: int) -> NamespaceHost:
        """Return the host on which a process runs."""
        return self._places[role, rank][0]

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        return self.host_of(role, rank).command(argv)

    def _environment(self, role: str, rank: int, scheduler: str) -> dict[str, str]:
        host, local_rank = self._places[role, rank]
        own = {config.variable("host"): host.address, config.variable("local_rank"): str(local_rank)}
        return super()._environment(role, rank, scheduler) | own


def _places(role: str, numbers: Sequence[int], hosts: Hosts) -> dict[tuple[str, int], tuple[NamespaceHost, int]]:
    """Return host and local rank of every process of a role."""
    places = [(host, local_rank) for host, number in zip(hosts, numbers, strict=True) for local_rank in range(number)]
    return {(role, rank): place for rank, place in enumerate(places)}
