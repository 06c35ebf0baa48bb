"""Calls of the Services API of a ResourceManager (``/app/v1/services``), as Hadoop's documentation describes it.

``python -m paceline.launch.engines.yarn.rest URL USER NAME [FILE]`` destroys a service and the file of its key.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError

_CALL_S = 60.0
_PATH = "/app/v1/services"


class Services:
    """The services of one user.

    Args:
        url: the ResourceManager's web address, as in ``http://rm:8088``.
        user: name that requests carry; clusters without Kerberos believe it.
    """

    def __init__(self, url: str, user: str) -> None:
        self.url, self.user = url.rstrip("/"), user

    def check(self) -> None:
        """Ask whether the API is there.

        Raises:
            LaunchError: it is not, or no answer comes.
        """
        self._call("GET", "/version")

    def create(self, service: Mapping[str, Any]) -> None:
        """Ask for a service.

        Raises:
            LaunchError: YARN refuses it; with YARN's message.
        """
        self._call("POST", "", service)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return what YARN says about a service, None if there is none of that name.

        Raises:
            LaunchError: YARN does not answer.
        """
        found = self._call("GET", f"/{name}", missing=True)
        return found or None

    def destroy(self, name: str) -> None:
        """End a service and its containers, if the service exists.

        Raises:
            LaunchError: YARN does not answer, or refuses.
        """
        self._call("DELETE", f"/{name}", missing=True)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, missing: bool = False
    ) -> dict[str, Any]:
        """Return the JSON of an answer, nothing for 404 if that is expected."""
        url = f"{self.url}{_PATH}{path}?{urllib.parse.urlencode({'user.name': self.user})}"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing:
                return {}
            raise LaunchError(f"YARN refused: {_why(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise LaunchError(
                f"no ResourceManager answers at {self.url} ({reason}): -o rm=URL, as in http://rm:8088"
            ) from None
        return _object(text)


def _why(error: urllib.error.HTTPError) -> str:
    """Return why YARN refused a call, and what to do where that is known."""
    answer = _object(error.read())
    said = answer.get("diagnostics") or answer.get("RemoteException", {}).get("message") or error.reason
    if error.code == 401:
        return f"{said}: it does not know this user (-o user=NAME); Kerberos is not supported"
    if error.code == 404:
        return "it has no Services API: its yarn-site.xml needs yarn.webapp.api-service.enable=true (Hadoop 3.1)"
    return str(said)


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:  # some answers are empty, errors of a proxy are HTML
        return {}
    return found if isinstance(found, dict) else {}


def main(words: Sequence[str]) -> int:
    """Destroy a service, after the file of its key; return the exit code."""
    url, user, name, *files = words
    for one in files:
        Path(one).unlink(missing_ok=True)
    Services(url, user).destroy(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
