"""The figures of the job for the user's tools: one endpoint for Prometheus, and trackers.

They run in the scheduler, because every job with servers has one, whichever launcher started it, and it has all
figures. The scheduler's thread takes a picture of the job once a second and hands it over; it never waits for a tool.
The endpoint shows the last picture. It answers one request at a time, and changes nothing.
"""

from __future__ import annotations

import http.server
import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import paceline
from paceline.config import Settings
from paceline.errors import ConfigError
from paceline.membership import Membership
from paceline.observe import prometheus
from paceline.observe.tracking import TrackerThread, by_step, overview
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Seconds between two pictures, and between two overviews for trackers.
PICTURE_INTERVAL_S, OVERVIEW_INTERVAL_S = 1.0, 5.0

#: How long trackers may take at the end of the job: less than the launcher waits for the scheduler.
CLOSE_TIMEOUT_S = 5.0

#: How long a client of the endpoint may take to say what it wants.
_REQUEST_TIMEOUT_S = 5.0


class Endpoint:
    """Serves ``/metrics`` over HTTP, in a thread of its own.

    Args:
        where: ``[HOST:]PORT``; without a host it is loopback.
        read: returns the text.

    Raises:
        ConfigError: ``where`` is no address, or it cannot be bound.
    """

    def __init__(self, where: str, read: Callable[[], str]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S
            server_version = "paceline"
            sys_version = ""

            def do_GET(self) -> None:
                """Answer with the text."""
                if urlsplit(self.path).path != "/metrics":
                    self.send_error(HTTPStatus.NOT_FOUND, "the figures are at /metrics")
                    return
                body = read().encode()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", prometheus.CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, format: str, *arguments: object) -> None:
                """Log nothing."""

        host, port = _address(where)
        try:
            self._server = _Server(host, port, Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics {where!r} cannot be served: {error}; give another port, or 0 for any") from None
        port = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="paceline-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.TCPServer):
    """A server of HTTP; the one of Python's library waits for DNS first."""

    allow_reuse_address = True

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)


def _address(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise ConfigError(f"metrics {where!r} is not [HOST:]PORT, as in 9464 or 0.0.0.0:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


class Exports:
    """Hands the figures of the job to the tools that the settings name.

    Args:
        settings: the scheduler's settings.

    Raises:
        ConfigError: a tool is unknown, or the endpoint cannot be bound.
        MissingExtraError: the package of a tool is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self._job = settings.job_id
        self._text = prometheus.text(m.Status([], [], []), [], self._job, paceline.__version__, time.time())
        self._next, self._next_overview, self._told = -math.inf, -math.inf, 0
        try:
            self._trackers = [TrackerThread(one.strip(), self._job) for one in settings.report_to.split(",") if one]
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.endpoint = Endpoint(settings.metrics, lambda: self._text) if settings.metrics else None
        if self.endpoint is not None and _address(settings.metrics)[1] == 0:
            logger.warning("metrics of this job: %s", self.endpoint.url)

    def note(self, membership: Membership, now: float) -> None:
        """Hand over the figures of now, if it is time. Does not wait."""
        if now < self._next or (self.endpoint is None and not self._trackers):
            return
        self._next = now + PICTURE_INTERVAL_S
        status = membership.status(now)
        if self.endpoint is not None:
            self._text = prometheus.text(status, membership.verdicts.slow, self._job, paceline.__version__, time.time())
        if self._trackers:
            self._track(membership, status, now)

    def _track(self, membership: Membership, status: m.Status, now: float) -> None:
        reported = membership.figures.since(self._told)
        self._told = membership.figures.made
        for step, figures in by_step(reported):
            self._put(figures, step)
        if now >= self._next_overview:
            self._next_overview = now + OVERVIEW_INTERVAL_S
            step, figures = overview(status)
            self._put(figures, step)

    def _put(self, figures: Mapping[str, float], step: int) -> None:
        for one in self._trackers if figures else ():
            one.put(figures, step)

    def close(self, membership: Membership) -> None:
        """Hand over the last figures, and let the trackers close their tools. Takes :data:`CLOSE_TIMEOUT_S` at most."""
        if self._trackers:
            membership.figures.settle((), math.inf)
            now = time.monotonic()
            self._next_overview = now
            self._track(membership, membership.status(now), now)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for one in self._trackers:
            one.close(max(0.1, deadline - time.monotonic()))
        if self.endpoint is not None:
            self.endpoint.close()
