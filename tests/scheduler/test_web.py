"""What the scheduler serves over HTTP, and to whom."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.scheduler import web
from paceline.scheduler.web import MOST_READERS, MOST_WAITING, Dashboard, Metrics

TIMEOUT_S = 60.0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text


# ---- the endpoint ----------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[Metrics]:
    made = Metrics("0", lambda: "figures\n")
    yield made
    made.close()


def test_endpoint_serves_the_text_on_loopback(endpoint: Metrics) -> None:
    assert endpoint.url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(endpoint.url, timeout=30) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "Python" not in answer.headers["Server"]
        assert answer.read() == b"figures\n"


@pytest.mark.parametrize("path", ["/", "/metrics/../x", "/metricsx"])
def test_endpoint_has_no_other_page(endpoint: Metrics, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="the figures are at /metrics"):
        get(endpoint.url.removesuffix("/metrics") + path)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_endpoint_changes_nothing(endpoint: Metrics, method: str) -> None:
    connection = http.client.HTTPConnection(endpoint.url.split("/")[2], timeout=30)
    connection.request(method, "/metrics")
    assert connection.getresponse().status == 501
    connection.close()


def test_client_that_says_nothing_or_nonsense_does_not_end_the_endpoint(endpoint: Metrics) -> None:
    host, port = endpoint.url.split("/")[2].split(":")
    for nonsense in (b"", b"\0\xff\r\n\r\n", b"GET /metrics HTTP/9.9\r\n\r\n", b"GET " + b"x" * 70_000):
        with socket.create_connection((host, int(port)), 30) as client:
            client.sendall(nonsense)
    assert get(endpoint.url) == "figures\n"


def test_page_of_another_host_whose_name_leads_to_loopback_reads_no_figures(endpoint: Metrics) -> None:
    for host, status in (("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost:1", 200)):
        connection = http.client.HTTPConnection(endpoint.url.split("/")[2], timeout=30)
        connection.request("GET", "/metrics", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()


def test_figures_that_other_hosts_may_read_have_any_name() -> None:
    made = Metrics("0.0.0.0:0", lambda: "figures\n")
    try:
        connection = http.client.HTTPConnection("127.0.0.1", int(made.url.split(":")[2].split("/")[0]), timeout=30)
        connection.request("GET", "/metrics", headers={"Host": "node7:9464"})
        assert connection.getresponse().read() == b"figures\n"
        connection.close()
    finally:
        made.close()


def test_port_that_is_taken_is_named(endpoint: Metrics) -> None:
    port = endpoint.url.split("/")[2].split(":")[1]
    with pytest.raises(ConfigError, match=f"metrics '{port}' cannot be served: .* give another port, or 0 for any"):
        Metrics(port, str)


# ---- the page --------------------------------------------------------------------------------------------------------

SECRET = "a figure of the job"


@pytest.fixture
def page() -> Iterator[Dashboard]:
    made = Dashboard(0, lambda: {"host": SECRET})
    yield made
    made.close(1.0)


def test_page_of_a_job_that_starts_again_keeps_its_secret() -> None:
    pages = [Dashboard(0, list, token) for token in ("kept", "", "")]
    for one in pages:
        one.close(1.0)
    assert query(pages[0]) == "token=kept"
    assert len({query(one) for one in pages}) == 3


def ask(page: Dashboard, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str, Any]:
    """Return status, text and headers of an answer."""
    connection = http.client.HTTPConnection(address(page), timeout=TIMEOUT_S)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def address(page: Dashboard) -> str:
    return page.url.split("/")[2]


def query(page: Dashboard) -> str:
    return page.url.rpartition("?")[2]


class Reader:
    """An open page."""

    def __init__(self, page: Dashboard) -> None:
        self._file = urllib.request.urlopen(f"http://{address(page)}/events?{query(page)}", timeout=TIMEOUT_S)

    def event(self) -> tuple[str, Any]:
        kind, line = "message", b""
        while not line.startswith(b"data: "):
            line = self._file.readline()
            assert line, "the connection has closed"
            kind = line[7:-1].decode() if line.startswith(b"event: ") else kind
        return kind, json.loads(line[6:])

    def rest(self) -> bytes:
        found: bytes = self._file.read()
        return found


def settle(is_done: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_page_is_on_loopback_and_its_address_has_a_long_secret(page: Dashboard) -> None:
    assert page.url.startswith("http://127.0.0.1:")
    assert len(query(page).partition("=")[2]) >= 32
    status, text, headers = ask(page, f"/?{query(page)}")
    assert (status, "EventSource" in text) == (200, True)
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")


@pytest.mark.parametrize("path", ["/", "/events", "/page.html", "/metrics"])
@pytest.mark.parametrize(
    "token", ["", "?token=", "?token=x", "?token=%ff", "?token=%F0%9F%98%80", "?Token={}", "?token={}x"]
)
def test_without_the_token_nothing_is_shown(page: Dashboard, path: str, token: str) -> None:
    status, text, headers = ask(page, path + token.format(query(page).partition("=")[2]))
    assert (status, text) == (403, "open the whole address that the launcher has printed, on that machine\n")
    assert SECRET not in str(headers)


@pytest.mark.parametrize("path", ["/", "/events"])
@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "evil@localhost", "[::2]:1"]
)
def test_page_of_another_host_whose_name_leads_here_gets_nothing(page: Dashboard, path: str, host: str) -> None:
    assert ask(page, f"{path}?{query(page)}", host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:1234", "[::1]:80"])
def test_names_of_loopback_are_served_also_through_a_tunnel_from_another_port(page: Dashboard, host: str) -> None:
    assert ask(page, f"/?{query(page)}", host)[0] == 200


def test_token_is_compared_in_constant_time(page: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(web.hmac, "compare_digest", lambda one, two: compared.append((one, two)))
    assert ask(page, f"/?{query(page)}")[0] == 403
    assert compared == [(query(page).partition("=")[2].encode(),) * 2]


def test_page_changes_nothing_and_has_no_other_part(page: Dashboard) -> None:
    assert ask(page, f"/?{query(page)}", method="POST")[0] == 501
    assert ask(page, f"/x?{query(page)}")[0] == 404


def test_reader_gets_the_history_then_news_then_the_end(page: Dashboard) -> None:
    reader = Reader(page)
    assert reader.event() == ("history", {"host": SECRET})
    for number in range(3):
        with page.lock:
            page.tell({"number": number})
        assert reader.event() == ("message", {"number": number})
    page.close(TIMEOUT_S)
    assert reader.event() == ("over", None)
    assert reader.rest() == b"\n"


def test_news_that_come_while_a_page_opens_reach_it_once() -> None:
    told: list[int] = []
    page = Dashboard(0, lambda: list(told))
    is_done = threading.Event()

    def tell() -> None:
        while not is_done.is_set():
            with page.lock:
                told.append(len(told))
                page.tell(len(told) - 1)
            time.sleep(0.001)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        for _ in range(4):
            reader = Reader(page)
            kind, history = reader.event()
            assert kind == "history"
            assert [reader.event()[1] for _ in range(3)] == [len(history) + number for number in range(3)]
    finally:
        is_done.set()
        teller.join()
        page.close(1.0)


def test_page_that_reads_nothing_is_cut_off_and_holds_nobody_up(
    page: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "WRITE_TIMEOUT_S", 0.5)
    client = socket.create_connection(tuple(address(page).split(":")), TIMEOUT_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(f"GET /events?{query(page)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    settle(lambda: len(page._readers) == 1)
    longest = 0.0
    for _ in range(MOST_WAITING + 40):  # more than the kernel and the queue take
        began = time.thread_time()
        with page.lock:
            page.tell("x" * 1_000_000)
        longest = max(longest, time.thread_time() - began)
    assert len(page._readers) == 0
    assert longest < 0.5
    settle(lambda: not [one for one in threading.enumerate() if "process_request_thread" in one.name])
    client.close()


def test_pages_are_few_and_those_that_close_make_room(page: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = [Reader(page) for _ in range(MOST_READERS)]
    assert [reader.event()[0] for reader in readers] == ["history"] * MOST_READERS
    status, text, _ = ask(page, f"/events?{query(page)}")
    assert (status, text) == (503, f"{MOST_READERS} pages of this job are open; close one\n")
    readers.pop()._file.close()

    def has_room() -> bool:
        with page.lock:
            page.tell(0)
        return len(page._readers) < MOST_READERS

    settle(has_room)
    assert Reader(page).event()[0] == "history"


def test_connections_are_few_and_a_silent_client_does_not_stay(
    page: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "REQUEST_TIMEOUT_S", 0.5)
    host, port = address(page).split(":")
    clients = [socket.create_connection((host, int(port)), TIMEOUT_S) for _ in range(40)]
    assert all(client.recv(1) == b"" for client in clients)  # closed by the page
    assert len([one for one in threading.enumerate() if "process_request_thread" in one.name]) <= 16
    assert ask(page, f"/?{query(page)}")[0] == 200
    for client in clients:
        client.close()


def half_requests(page: Dashboard, count: int) -> list[socket.socket]:
    """Return connections of strangers that have begun a request."""
    host, port = address(page).split(":")
    clients = [socket.create_connection((host, int(port)), TIMEOUT_S) for _ in range(count)]
    for client in clients:
        with contextlib.suppress(OSError):  # it has made room already
            client.sendall(b"GET / HTTP/1.1\r\n")
    return clients


def test_strangers_who_hold_connections_lock_nobody_out(page: Dashboard) -> None:
    reader = Reader(page)
    assert reader.event()[0] == "history"
    clients = half_requests(page, 60)
    assert ask(page, f"/?{query(page)}")[0] == 200
    with page.lock:
        page.tell("news")
    assert reader.event() == ("message", "news")
    for client in clients:
        client.close()


def test_request_that_comes_by_single_bytes_has_one_deadline(page: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_TIMEOUT_S", 0.5)
    [client] = half_requests(page, 1)
    client.settimeout(0.1)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        assert time.monotonic() < deadline, "it is read for ever"
        try:
            client.sendall(b"x")
            if not client.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    client.close()


def test_request_with_too_many_lines_is_not_read(page: Dashboard) -> None:
    [client] = half_requests(page, 1)
    lines = b"".join(b"X-%d: %s\r\n" % (number, bytes(60_000).replace(b"\0", b"x")) for number in range(20))
    answer = b""
    with contextlib.suppress(OSError):
        client.sendall(lines + b"\r\n")
        answer = client.recv(1000)
    assert answer == b""
    client.close()
