"""``paceline doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.cli.options import Option, Parser, UsageError, read_hosts, shell_words
from paceline.host.plain_text import plain
from paceline.launch import with_default_interface
from paceline.launch.preflight import check_program
from paceline.launch.remote import agent_here, explain
from paceline.launch.remote.host_checks import Doctor, Finding
from paceline.launch.ssh import over_ssh
from paceline.observe.table import table

OPTIONS = (
    Option(("-H", "--hosts"), "hostfile, or a list h1,h2", "HOSTS"),
    Option(("-i", "--interface"), "network interface of the hosts, by name, address or CIDR", "INTERFACE", default=""),
    Option(("--ssh",), "command that reaches a host (default: ssh)", "COMMAND", default="ssh"),
    Option(("--python",), "interpreter on the hosts (default: this one)", "PATH"),
    Option(("--timeout",), "for each step (default: 20)", "SECONDS", float, default=20.0, positive=True),
)
_DESCRIPTION = """\
Check every host: ssh, Python, versions of packages, clock, network interface, whether it reaches every other host, and
whether this directory is shared. Ends with 1 if there is something to fix."""


def run(name: str, words: Sequence[str]) -> int:
    """Check hosts and print a table."""
    options = Parser(name, OPTIONS, "paceline doctor -H HOSTS [options]", _DESCRIPTION).parse(words)
    if options.hosts is None:
        raise UsageError("the hosts are missing; give -H, as in: paceline doctor -H hosts")
    if options.python == "":
        raise UsageError("--python is empty; it takes the path of an interpreter on the hosts")
    ssh = shell_words(options.ssh)
    check_program(ssh[0], "openssh-client")
    hosts = with_default_interface(read_hosts(options.hosts), options.interface)
    script = agent_here(options.python or "")
    findings = Doctor(hosts, partial(over_ssh, ssh, words=script), explain, options.timeout).run()
    print(shown(findings))
    return 1 if any(finding.problems for finding in findings) else 0


def shown(findings: Sequence[Finding]) -> str:
    """Return the table of findings, and what to fix."""
    head = ("host", "ssh", "python", "paceline", "torch", "cores", "clock", "address", "reaches", "directory")
    lines = [table(head, [cells(finding, head) for finding in findings])]
    problems = [plain(f"  {finding.host.name}: {problem}") for finding in findings for problem in finding.problems]
    return "\n".join([*lines, "", *(["to fix:", *problems] if problems else ["nothing to fix"])])


def cells(finding: Finding, head: Sequence[str]) -> list[str]:
    """Return a finding as cells of a table with these columns."""
    about, facts = finding.about, finding.facts
    found = {"host": finding.host.name, "ssh": "ok" if about else "failed"}
    if about and facts:
        reached = finding.reached or {}
        found |= {
            "python": about["version"],
            "paceline": facts["versions"]["paceline"] or "source",
            "torch": facts["versions"]["torch"] or "missing",
            "cores": str(about["cores"]),
            "clock": f"{finding.skew_s:+.2f} s",
            "address": finding.address,
            "reaches": f"{sum(not why for why in reached.values())} of {len(reached)}",
            "directory": "shared" if facts["shared"] else "missing",
        }
    return [found.get(name, "") for name in head]
