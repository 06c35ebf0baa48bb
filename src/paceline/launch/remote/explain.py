"""Say why a remote shell ended, in one sentence with what to do."""

from __future__ import annotations

import re

from paceline.launch.hosts import Host
from paceline.launch.remote.job import NO_DIRECTORY, NO_PYTHON
from paceline.launch.remote.link import AgentLink

_KNOWN = (
    ("Could not resolve hostname", "is unknown: check its name in the hosts file or in ~/.ssh/config"),
    ("Host key verification failed", "has a host key that ssh does not know: connect once by hand with `ssh {host}`"),
    ("Permission denied", "refused your ssh key: install it with `ssh-copy-id {host}`, and load it with `ssh-add`"),
    ("Too many authentication failures", "refused your ssh keys: name one with IdentityFile in ~/.ssh/config"),
    ("Connection refused", "has no ssh server at that port: start sshd there, or give the port as {host}:PORT"),
    ("timed out", "did not answer: is it up, and does a firewall let ssh through?"),
    ("No route to host", "cannot be reached: is it up, and in this network?"),
    ("Network is unreachable", "cannot be reached: this machine has no route to its network"),
    (
        "No module named paceline",
        "has Python but not paceline: install it there (pip install paceline), or give its interpreter with "
        "-o python=PATH, or copy this directory with --sync-dst-dir",
    ),
    ("No module named 'paceline", "has an older paceline than this machine: install the same version there"),
    ("unknown command 'agent'", "has an older paceline than this machine: install the same version there"),
)  # fmt: skip


def explain(host: Host, link: AgentLink) -> str:
    """Return why the remote shell to a host ended."""
    text = "\n".join(link.errors)
    for sign, meaning in _KNOWN:
        if sign in text:
            return f"host {host.name} {meaning.format(host=host.name)} ({_last(link)})"
    if link.about:
        if link.code is None:
            return f"host {host.name} fell silent: is it up, and the network between?"
        return f"the connection to host {host.name} ended: {_last(link) or f'exit code {link.code}'}"
    if link.code == NO_DIRECTORY:
        return (
            f"host {host.name} does not have this directory ({_last(link)}): share it, or copy it there with "
            "--sync-dst-dir DIR"
        )
    if link.code == NO_PYTHON:
        return f"host {host.name} has no such Python ({_last(link)}): install it there, or name one: -o python=PATH"
    return f"host {host.name} did not start an agent (exit code {link.code}): {_last(link) or link.noise or 'no word'}"


def _last(link: AgentLink) -> str:
    lines = [re.sub(r"\s+", " ", line) for line in link.errors]
    return lines[-1] if lines else ""
