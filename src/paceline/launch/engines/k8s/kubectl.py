"""Calls of kubectl. Objects travel on stdin, so no secret is a word of a command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, cast

from paceline.errors import LaunchError

_CALL_S = 60.0


class Kubectl:
    """kubectl with the user's own configuration (``KUBECONFIG``, ``~/.kube/config``).

    Args:
        namespace: of all calls; empty: that of the context.
    """

    def __init__(self, namespace: str = "") -> None:
        self._base = ["kubectl", *(["--namespace", namespace] if namespace else [])]

    @staticmethod
    def is_there() -> bool:
        """Tell whether the program exists."""
        return shutil.which("kubectl") is not None

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the command line of a call."""
        return [*self._base, *words]

    def run(self, words: Sequence[str], text: str | None = None, limit_s: float = _CALL_S) -> str:
        """Run one call and return what it printed.

        Raises:
            LaunchError: it failed; with what kubectl said.
        """
        try:
            done = subprocess.run(
                self.words(words), input=text, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except FileNotFoundError:
            raise LaunchError("kubectl is not on the PATH; install it, or write the manifests with --dry-run") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"kubectl {words[0]} did not answer within {limit_s:g} s") from None
        if done.returncode:
            raise LaunchError(f"kubectl {' '.join(words[:3])}: {done.stderr.strip() or 'failed without a word'}")
        return done.stdout

    def get(self, words: Sequence[str]) -> dict[str, Any]:
        """Return what ``kubectl get`` finds.

        Raises:
            LaunchError: see :meth:`run`.
        """
        return cast("dict[str, Any]", json.loads(self.run(["get", *words, "--output", "json"])))

    def version(self) -> tuple[int, int]:
        """Return the version of the cluster: ``(1, 31)``.

        Raises:
            LaunchError: see :meth:`run`; or the cluster says nothing of its version.
        """
        found = json.loads(self.run(["version", "--output", "json"])).get("serverVersion") or {}
        match = re.match(r"v?(\d+)\.(\d+)", str(found.get("gitVersion", "")))
        if match is None:
            raise LaunchError(f"kubectl version tells no version of the cluster: {found}")
        return int(match[1]), int(match[2])

    def follow(self, pod: str) -> subprocess.Popen[bytes]:
        """Start to follow what a pod prints, from its beginning to its end."""
        return subprocess.Popen(
            self.words(["logs", "--follow", f"pod/{pod}"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
