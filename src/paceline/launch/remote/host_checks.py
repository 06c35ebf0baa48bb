"""Check hosts before a job needs them: an agent's facts about its host, and their meaning."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import config
from paceline.errors import ConfigError
from paceline.host.interfaces import with_own_scope
from paceline.launch.host_list import Host
from paceline.launch.remote.agent_link import AgentLink
from paceline.launch.remote.request import Explain, HostCommand
from paceline.launch.supervise.crew import free_port, serve
from paceline.launch.supervise.guardian import Guardian
from paceline.naming import listed

#: Clocks that differ by more make logs hard to read; nothing else depends on them.
SKEW_S = 1.0

_REACH_S = 3.0
_PACKAGES = ("paceline", "torch")
_OPEN = "open the ports between the hosts, or choose -i"


@dataclass
class Finding:
    """The facts about a host."""

    host: Host
    about: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    address: str = ""
    """Where the other hosts reach it in a job; empty: unknown."""
    skew_s: float = 0.0
    reached: dict[str, str] | None = None
    """The failure on the way to each other host."""
    problems: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    """Those of them with which a job runs."""

    @property
    def obstacles(self) -> list[str]:
        """Those of them with which no job runs on this host."""
        return [problem for problem in self.problems if problem not in self.harmless]


class Doctor:
    """Opens an agent on each host and asks it; each step has a limit. ``shares``: the hosts need this directory."""

    def __init__(
        self, hosts: Sequence[Host], command: HostCommand, explain: Explain, timeout_s: float, *, shares: bool = True
    ) -> None:
        self._shares = shares
        self._findings = {host.name: Finding(host) for host in hosts}
        self._command, self._explain, self._timeout_s = command, explain, timeout_s
        self._ports: dict[str, int] = {}

    def run(self) -> list[Finding]:
        """Check everything and return a finding per host."""
        guardian = Guardian()
        witness = Path(f".paceline-doctor-{secrets.token_hex(8)}")
        try:
            with contextlib.suppress(OSError):  # it cannot be written, so nothing tells whether the hosts share it
                witness.touch()
            self._shares = self._shares and witness.exists()
            with selectors.DefaultSelector() as self._selector:
                self._examine(guardian, witness)
        finally:
            with contextlib.suppress(OSError):  # missing_ok does not help where all is read-only
                witness.unlink()
            guardian.close()
        broken = broken_ways({name: finding.reached or {} for name, finding in self._findings.items()})
        for finding in self._findings.values():
            self._judge(finding)
            finding.problems += broken.get(finding.host.name, [])
        return list(self._findings.values())

    def _examine(self, guardian: Guardian, witness: Path) -> None:
        ports = os.environ.get(config.variable("ports"), "")
        with contextlib.ExitStack() as stack:
            links = [self._open(finding, guardian) for finding in self._findings.values()]
            for link in links:
                stack.callback(link.close)
            live = self._answered(links, lambda one: bool(one.about))
            for link in live:
                interface = self._findings[link.host].host.interface
                link.ask_address([interface] if interface else [], live, ports)
                link.send("facts", witness.name, ports)
            live = self._answered(live, lambda one: bool(one.facts))
            for link in live:
                link.send("reach", self._targets(link.host))
            self._answered(live, lambda one: one.reached is not None)

    def _open(self, finding: Finding, guardian: Guardian) -> AgentLink:
        host = finding.host
        return AgentLink(
            host.name, self._command(host), self._selector, guardian.register, self._heard, lambda text: None
        )

    def _answered(self, links: list[AgentLink], has: Callable[[Finding], bool]) -> list[AgentLink]:
        """Wait for the hosts' answers, and return those that have one; no answer is a problem."""

        def is_over() -> bool:
            for link in links:
                link.type_command(time.monotonic())
            return all(link.code is not None or has(self._findings[link.host]) for link in links)

        serve(self._selector, self._timeout_s, is_over)
        silent = [link for link in links if not has(self._findings[link.host])]
        for link in silent:
            finding = self._findings[link.host]
            link.drain()
            late = f"host {link.host} did not answer within {self._timeout_s:g} s"
            finding.problems.append(late if link.code is None else self._explain(finding.host, link))
        return [link for link in links if link not in silent]

    def _heard(self, link: AgentLink, line: list[Any]) -> None:
        finding = self._findings[link.host]
        match line:
            case ["hello", dict() as about]:
                link.about = finding.about = about
                finding.skew_s = about["clock"] - time.time()
            case ["address", str() as address, int()]:
                finding.address = address
            case ["refused", str() as reason]:
                finding.problems.append(reason)
            case ["facts", dict() as facts, int() as port]:
                finding.facts = facts
                self._ports[link.host] = port
            case ["reached", dict() as reached]:
                finding.reached = reached

    def _targets(self, own: str) -> list[list[Any]]:
        """Return address and port of the other hosts."""
        found = [(name, self._findings[name].address, port) for name, port in self._ports.items()]
        return [[name, address, port] for name, address, port in found if name != own and address]

    def _judge(self, finding: Finding) -> None:
        """Turn the finding into problems, each with advice."""
        problems, facts = finding.problems, finding.facts
        if not facts:
            return
        here = _versions(self._findings)
        for name, version in facts["versions"].items():
            if not version and name == "torch":
                problems.append(f"torch is missing for {finding.about['python']}: pip install torch")
            elif version != here.get(name, version):
                problems.append(f"{name} is {version or 'missing'}, elsewhere {here[name]}: install one version")
        if self._shares and not facts["shared"]:
            problems.append(f"this directory ({os.getcwd()}) is not shared: use --sync-dst-dir DIR")
        if abs(finding.skew_s) > SKEW_S:
            problems.append(f"its clock differs by {finding.skew_s:+.1f} s: run ntpd or chronyd")
            finding.harmless.append(problems[-1])


def broken_ways(reached: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the problems of the hosts without which all others reach each other, as few as possible.

    Args:
        reached: by host, the failure on the way to each other host; empty: it was reached.
    """
    ways = {(one, other): why for one, found in reached.items() for other, why in found.items() if why}
    problems: dict[str, list[str]] = {}
    while ways:
        ends = [name for way in ways for name in way]
        into = [other for _, other in ways]  # of two hosts with as many broken ways, the one that does not let in
        worst = max(reversed(list(reached)), key=lambda name: (ends.count(name), into.count(name)))
        shut, cut = [one for one, other in ways if other == worst], [other for one, other in ways if one == worst]
        problems[worst] = [f"cannot be reached by {listed(shut)}: {ways[shut[0], worst]}; {_OPEN}"] if shut else []
        problems[worst] += [f"cannot reach {listed(cut)}: {ways[worst, cut[0]]}; {_OPEN}"] if cut else []
        ways = {way: why for way, why in ways.items() if worst not in way}
    return problems


def _versions(findings: Mapping[str, Finding]) -> dict[str, str]:
    """Return the version of each package that most hosts have."""
    found: dict[str, list[str]] = {}
    for finding in findings.values():
        for name, version in finding.facts.get("versions", {}).items():
            if version:
                found.setdefault(name, []).append(version)
    return {name: max(set(versions), key=versions.count) for name, versions in found.items()}


def facts(witness: str) -> dict[str, Any]:
    """Return versions of packages, and whether a file is in this directory."""
    from importlib import metadata  # a tenth of the start of an agent, most of which check nothing

    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return {"versions": versions, "shared": os.path.exists(witness)}


def listen(ports: str = "") -> socket.socket:
    """Return a socket that listens on every address of this host, on a free port, which may be of a range."""
    try:
        port = free_port(ports)
    except ConfigError:  # the answer to "address" says so
        port = 0
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel has IPv6, but it is switched off
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=128)


def reach(targets: Sequence[Sequence[Any]]) -> dict[str, str]:
    """Connect to (host, address, port) of all others at once; return what went wrong, or nothing, by host."""
    with ThreadPoolExecutor(max(1, len(targets))) as threads:
        return dict(threads.map(_reach, targets))


def _reach(target: Sequence[Any]) -> tuple[str, str]:
    host, address, port = target
    try:
        socket.create_connection((with_own_scope(address), port), _REACH_S).close()
    except TimeoutError:
        return host, f"no answer within {_REACH_S:g} s"
    except OSError as error:
        return host, error.strerror or str(error)
    return host, ""
