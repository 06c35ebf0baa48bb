"""The scheduler's addresses for HTTP: figures for Prometheus, and the page of the job.

| address | open to | answer |
|---|---|---|
| ``[HOST:]PORT/metrics`` | everybody that reaches it | the last figures |
| ``127.0.0.1:PORT/?token=...`` | holders of the token, on this host | the page |
| ``127.0.0.1:PORT/events?token=...`` | the same | the history so far, then news: server-sent events |

Requests change nothing. A request to loopback whose ``Host`` is not a name of loopback comes from a page of somebody
else whose name leads here, and is refused. The scheduler's thread hands news over and never waits: a reader that does
not keep up is cut off, and begins anew.

Each connection has a thread, and there are :data:`_MOST_CONNECTIONS` at most. One more ends the oldest of those that
have shown no token, so that strangers who hold connections lock nobody out.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import io
import ipaddress
import queue
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import msgspec

from paceline.config import metrics_address
from paceline.errors import ConfigError
from paceline.observe import page, prometheus

#: How long a client may take to send its request, and to take an answer or a piece of it.
REQUEST_TIMEOUT_S, WRITE_TIMEOUT_S = 5.0, 15.0

#: Bytes of a request: a browser sends the cookies of all servers of its host.
_MOST_REQUEST_BYTES = 64 << 10

#: Connections at a time, and how many of them may read events.
_MOST_CONNECTIONS, MOST_READERS = 16, 6

#: Pieces of news that wait for a reader.
MOST_WAITING = 32

#: Silence after which a reader gets a sign of life; so one that has gone is noticed.
_SIGN_S = 10.0

_LOOPBACK = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:\d+)?", re.ASCII)
_BLANK_LINE = re.compile(rb"\n\r?\n")


@dataclass(frozen=True)
class WebReply:
    """An answer; a body in pieces ends with the connection."""

    kind: str
    body: bytes | Iterator[bytes]
    status: HTTPStatus = HTTPStatus.OK
    reason: str | None = None
    """Words beside the status; None: the usual ones."""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_trusted: bool = False
    """The request has shown the token: its connection makes no room for others."""


class Site:
    """Serves HTTP in threads of its own.

    Args:
        name: name of the setting, for messages.
        host: address to bind.
        port: port to bind; 0: a free one.
        answer: returns the answer to a target and a ``Host``.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, name: str, host: str, port: int, answer: Callable[[SplitResult, str], WebReply]) -> None:
        class Handler(_Handler):
            reply = staticmethod(answer)

        try:
            self._server = _Server(host, port, Handler)
        except OSError as error:
            raise ConfigError(f"{name} '{port}' cannot be served: {error}; give another port, or 0 for any") from None
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        thread = threading.Thread(target=self._server.serve_forever, name=f"paceline-{name}", daemon=True)
        thread.start()

    def close(self) -> None:
        """Serve no new connections."""
        # It listens no more, so that its thread wakes: by itself it looks up twice a second. Not every system can.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version = "paceline"
    sys_version = ""
    reply: Callable[[SplitResult, str], WebReply]

    def setup(self) -> None:
        """Read the whole request: all of it has one deadline, and is bounded."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(_request(self.connection))

    def do_GET(self) -> None:
        """Answer."""
        reply = self.reply(urlsplit(self.path), self.headers.get("Host", ""))
        if reply.is_trusted:
            self.server.trust(self.connection)
        self.connection.settimeout(WRITE_TIMEOUT_S)
        self.send_response(reply.status, reply.reason)
        headers = {"Content-Type": reply.kind, "X-Content-Type-Options": "nosniff", **reply.headers}
        if isinstance(reply.body, bytes):
            headers["Content-Length"] = str(len(reply.body))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "GET":
            return
        with contextlib.suppress(OSError):  # the client has gone, or is too slow
            for piece in (reply.body,) if isinstance(reply.body, bytes) else reply.body:
                self.wfile.write(piece)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def _request(connection: socket.socket) -> bytes:
    """Return the lines of a request.

    Raises:
        OSError: they do not come in time.
        ValueError: there are too many.
    """
    deadline, found, read = time.monotonic() + REQUEST_TIMEOUT_S, bytearray(), 0
    while not _BLANK_LINE.search(found, max(0, read - 3)):
        read = len(found)
        if read > _MOST_REQUEST_BYTES:
            raise ValueError("the request is too long")
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(_MOST_REQUEST_BYTES)
        if not piece:
            break
        found += piece
    return bytes(found)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server of HTTP; the one of Python's library waits for DNS first."""

    allow_reuse_address = daemon_threads = True
    block_on_close, request_queue_size = False, 128

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._open: dict[socket.socket, bool] = {}
        """The connections in the order in which they came, and whether each has shown the token."""
        super().__init__((host, port), handler)

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Take a connection, in the place of another one where there are too many; refuse it where that cannot be."""
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest = next((one for one, is_trusted in self._open.items() if not is_trusted), None)
                if oldest is None:
                    return False
                del self._open[oldest]
                with contextlib.suppress(OSError):  # its thread notices
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = False
        return True

    def trust(self, connection: socket.socket) -> None:
        """Note that a connection has shown the token."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = True

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection, and close it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: a client that goes away is no error of the job."""


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Metrics:
    """Serves ``/metrics``.

    Args:
        where: ``[HOST:]PORT``; without a host it is loopback.
        read: returns the text.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, where: str, read: Callable[[], str]) -> None:
        host, port = metrics_address(where)
        self._read, self._is_loopback = read, _is_loopback(host)
        self._site = Site("metrics", host, port, self._answer)
        self.url, self.close = f"{self._site.address}/metrics", self._site.close

    def _answer(self, target: SplitResult, host: str) -> WebReply:
        if self._is_loopback and not _LOOPBACK.fullmatch(host.lower()):
            return _text(HTTPStatus.FORBIDDEN, "the figures are at 127.0.0.1; give --metrics HOST:PORT for other names")
        if target.path != "/metrics":
            return _text(HTTPStatus.NOT_FOUND, "the figures are at /metrics")
        return WebReply(prometheus.CONTENT_TYPE, self._read().encode())


class _Reader:
    """A page that is open, and the news that wait for it."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self.is_cut_off = False
        self.has_ended = threading.Event()


class Dashboard:
    """Serves the page of the job, and its events.

    Args:
        port: port on loopback; 0: a free one.
        history: returns a copy of all that there was so far. Called by the threads of readers, with :attr:`lock` held.

    Attributes:
        lock: held while the history changes and is told: so a reader gets each change once.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, port: int, history: Callable[[], object], token: str = "") -> None:
        self._history, self._token = history, token or secrets.token_urlsafe(24)
        self._readers: set[_Reader] = set()
        self.lock = threading.Lock()
        self._site = Site("dashboard", "127.0.0.1", port, self._answer)
        self.url = f"{self._site.address}/?token={self._token}"

    def tell(self, news: object) -> None:
        """Hand news over to the pages that are open. Does not wait. Called with :attr:`lock` held."""
        text = msgspec.json.encode(news) if self._readers else b""
        for reader in list(self._readers):
            try:
                reader.waiting.put_nowait(text)
            except queue.Full:
                reader.is_cut_off = True
                self._readers.discard(reader)

    def close(self, timeout_s: float) -> None:
        """Let readers take the news that wait for them, for so long at most, and serve no more."""
        with self.lock:
            readers, deadline = list(self._readers), time.monotonic() + timeout_s
        for reader in readers:
            with contextlib.suppress(queue.Full):
                reader.waiting.put_nowait(None)
        for reader in readers:
            reader.has_ended.wait(max(0.0, deadline - time.monotonic()))
        self._site.close()

    def _answer(self, target: SplitResult, host: str) -> WebReply:
        token = parse_qs(target.query).get("token", [""])[0]
        is_right = hmac.compare_digest(token.encode(errors="replace"), self._token.encode())
        if not is_right or not _LOOPBACK.fullmatch(host.lower()):
            return _text(HTTPStatus.FORBIDDEN, "open the whole address that the launcher has printed, on that machine")
        headers = {
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Security-Policy": f"{page.policy()}; frame-ancestors 'none'",
        }
        if target.path == "/":
            return WebReply("text/html; charset=utf-8", page.page(), headers=headers, is_trusted=True)
        if target.path != "/events":
            return _text(HTTPStatus.NOT_FOUND, "the page is at /")
        if len(self._readers) >= MOST_READERS:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_READERS} pages of this job are open; close one")
        return WebReply("text/event-stream", self._events(), headers=headers, is_trusted=True)

    def _events(self) -> Iterator[bytes]:
        reader = _Reader()
        with self.lock:
            history = self._history()
            self._readers.add(reader)
        try:
            yield b"event: history\ndata: %s\n\n" % msgspec.json.encode(history)
            while not reader.is_cut_off:
                try:
                    news = reader.waiting.get(timeout=_SIGN_S)
                except queue.Empty:
                    yield b":\n\n"
                    continue
                yield b"event: over\ndata: null\n\n" if news is None else b"data: %s\n\n" % news
                if news is None:
                    return
        finally:
            self._readers.discard(reader)
            reader.has_ended.set()


def _text(status: HTTPStatus, text: str) -> WebReply:
    return WebReply("text/plain; charset=utf-8", f"{text}\n".encode(), status, text)
