"""The transport between processes: ROUTER and DEALER sockets of ZeroMQ, with the job's security.

States of a channel, as its socket's monitor reports them:

| state | event | next state |
|---|---|---|
| connecting | handshake succeeded | open |
| connecting | handshake failed ``REFUSALS`` times, or the protocol differs | refused: ZeroMQ may have given up |
| open | disconnected | connecting; ZeroMQ tries again after 50 ms to 1 s |
| connecting, after it was open | handshake succeeded | open, and reported once as reopened |
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.transport.allocator import keep_freed_frames
from paceline.transport.base import Frames
from paceline.transport.outgoing import Outgoing
from paceline.transport.security import Security
from paceline.wire.limits import MAX_FRAME_BYTES

#: Smaller frames are copied: that costs less than to track when they have been sent.
COPY_BELOW_BYTES = 16 * 1024

#: Limits of what one receive takes from a socket, so that no peer keeps the loop busy. The last message may exceed it.
BURST, BURST_BYTES = 256, 16 * 1024 * 1024

#: Check interval for room in the window while messages wait to be sent: ZeroMQ does not report it.
FLUSH_MS = 1

#: Messages that ZeroMQ receives from one peer ahead of this process: enough to keep it busy. The rest waits at the
#: sender, where frames are views of arenas; here each would be a copy.
RECEIVE_AHEAD = 4

#: Failed handshakes that mean that the keys differ. A single one may fail while a listener starts.
REFUSALS = 3

_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
)


def _common(socket: zmq.Socket[bytes], addresses: Sequence[str], bulk: bool) -> None:
    socket.ipv6 = any("[" in address for address in addresses)
    socket.linger = 0
    socket.sndhwm, socket.rcvhwm = 0, RECEIVE_AHEAD if bulk else 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.handshake_ivl = 10_000
    socket.tcp_keepalive = 1


class _Waker:
    """An eventfd that makes a poll return."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def _send(socket: zmq.Socket[bytes], frames: Sequence[Any], track: bool = False) -> zmq.MessageTracker | None:
    """Send a message; with ``track`` returns what tells when its last large frame has been sent."""
    tracker = None
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        large = _size(frame) >= COPY_BELOW_BYTES
        # Queues have no limit, so a send blocks only where ZeroMQ has no connection, and then it would never end.
        flags = zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0)
        sent = socket.send(frame, flags, copy=not large, track=track and large)
        tracker = sent if large else tracker
    return tracker


def _size(frame: Any) -> int:
    return len(frame) if isinstance(frame, bytes) else int(memoryview(frame).nbytes)


class _Lane:
    """Messages to one peer: those that ZeroMQ has, and those that wait."""

    def __init__(self) -> None:
        self.waiting: Outgoing[Frames] = Outgoing()
        self._under_way: deque[tuple[zmq.MessageTracker, int]] = deque()

    def under_way(self) -> int:
        """Return the bytes that ZeroMQ has and has not sent yet."""
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()
        return sum(size for _, size in self._under_way)

    def flush(self, socket: zmq.Socket[bytes], peer: bytes) -> None:
        """Hand as much to ZeroMQ as the window has room for."""
        while self.waiting and (taken := self.waiting.take(self.under_way())) is not None:
            tracker = _send(socket, [peer, *taken[0]], track=True)
            if tracker is not None:
                self._under_way.append((tracker, taken[1]))


def _receive(socket: zmq.Socket[bytes]) -> list[list[zmq.Frame]]:
    messages: list[list[zmq.Frame]] = []
    room = BURST_BYTES
    while len(messages) < BURST and room > 0:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            break
        room -= sum(map(len, messages[-1]))
    return messages


def _events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    events = []
    while monitor.poll(0):
        message = recv_monitor_message(monitor, zmq.NOBLOCK)
        events.append((int(message["event"]), int(message["value"])))
    return events


class ZmqListener:
    """A ROUTER socket.

    Args:
        addresses: what to bind, e.g. ``tcp://10.0.0.1:*``.
        security: the job's keys.
        bulk: carries tensors, which may go unencrypted.
        watch: notice closed connections (:meth:`lost`).
    """

    def __init__(
        self, addresses: Sequence[str], security: Security, *, bulk: bool = False, watch: bool = False
    ) -> None:
        if bulk:
            keep_freed_frames()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _common(self._socket, addresses, bulk)
        self._socket.router_handover = True
        self._authenticator = security.protect_listener(self._socket, bulk)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if watch else None
        self._waker = _Waker()
        self._peers: dict[int, set[bytes]] = {}
        self._lost: list[bytes] = []
        self._lanes: dict[bytes, _Lane] = {}
        self.addresses = tuple(self._bind(address) for address in addresses)
        self._poller = zmq.Poller()
        for source in (self._socket, self._waker.fd, self._monitor):
            if source is not None:
                self._poller.register(source, zmq.POLLIN)

    def _bind(self, address: str) -> str:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from error
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return what has arrived as (peer, frames)."""
        self._flush()
        messages = _receive(self._socket)
        deadline = time.monotonic() + timeout_s
        while not messages:
            busy = self._flush()
            left_ms = math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
            ready = self._poller.poll(min(left_ms, FLUSH_MS) if busy else left_ms)
            messages = _receive(self._socket)
            if ready or not left_ms:
                break
        self._waker.clear()
        if self._monitor is not None:
            self._note_peers(messages)
        return [(frames[0].bytes, frames[1:]) for frames in messages if len(frames) > 1]

    def _note_peers(self, messages: list[list[zmq.Frame]]) -> None:
        assert self._monitor is not None
        for event, fd in _events(self._monitor):
            if event == zmq.EVENT_DISCONNECTED:
                self._lost.extend(self._peers.pop(fd, ()))
        for frames in messages:
            self._peers.setdefault(int(frames[-1].get(zmq.SRCFD)), set()).add(frames[0].bytes)

    def send(self, peer: bytes, frames: Frames, urgency: int | None = None) -> None:
        """Send to a peer; dropped when it is gone."""
        lane = self._lanes.get(peer)
        if lane is None:
            if urgency is None:
                _send(self._socket, [peer, *frames])
                return
            lane = self._lanes[peer] = _Lane()
        lane.waiting.add(frames, sum(map(_size, frames)), urgency)
        lane.flush(self._socket, peer)

    def _flush(self) -> bool:
        """Send what there is room for; returns whether messages still wait."""
        for peer, lane in self._lanes.items():
            lane.flush(self._socket, peer)
        return any(lane.waiting for lane in self._lanes.values())

    def lost(self) -> list[bytes]:
        """Return peers whose connection has closed since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def watch_hub(self, hub: ZmqHub) -> None:
        """Make ``receive`` return also when something arrives at a hub that the same thread uses."""
        hub.add_poller(self._poller)

    def wake(self) -> None:
        """Make ``receive`` return now."""
        self._waker.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket and stop the authenticator."""
        if self._socket.closed:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._waker.close()


class _Channel:
    """A DEALER socket and what its monitor has reported."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes, security: Security, bulk: bool
    ):
        self.socket = context.socket(zmq.DEALER)
        _common(self.socket, [address], bulk)
        self.socket.identity = identity
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 50, 1000
        security.protect_channel(self.socket, bulk)
        wanted = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        for event in _HANDSHAKE_FAILURES:
            wanted |= event
        self.monitor = self.socket.get_monitor_socket(wanted)
        self.is_open = self.was_open = self.reopened = False
        self.failures = 0
        self.reason = ""
        self.socket.connect(address)

    def note_events(self) -> None:
        for event, _ in _events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.reopened |= self.was_open
                self.is_open, self.was_open, self.failures = True, True, 0
            elif event == zmq.EVENT_DISCONNECTED:
                self.is_open = False
            else:
                # After an error in the protocol ZeroMQ does not connect again.
                self.failures += REFUSALS if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else 1
                self.reason = {
                    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not admit this process's key",
                    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "one side uses a key and the other does not",
                }.get(event, "the keys differ")

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class ZmqHub:
    """DEALER sockets, one per channel.

    Args:
        security: the job's keys.
    """

    def __init__(self, security: Security) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = security
        self._channels: list[_Channel] = []
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._pollers: list[zmq.Poller] = []
        self._closed = False

    def connect(self, address: str, identity: bytes, *, bulk: bool = False) -> int:
        """Open a channel; returns its index."""
        if bulk:
            keep_freed_frames()
        channel = _Channel(self._context, address, identity, self._security, bulk)
        self._channels.append(channel)
        for poller in (self._poller, *self._pollers):
            poller.register(channel.socket, zmq.POLLIN)
        self._poller.register(channel.monitor, zmq.POLLIN)
        return len(self._channels) - 1

    def add_poller(self, poller: zmq.Poller) -> None:
        """Register all channels, also those to come, with a poller of the same thread."""
        self._pollers.append(poller)
        for channel in self._channels:
            poller.register(channel.socket, zmq.POLLIN)

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel; dropped when ZeroMQ has given the channel up, which :meth:`refused` reports."""
        with contextlib.suppress(zmq.Again):
            _send(self._channels[channel].socket, frames)

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """Return what has arrived as (channel, frames)."""
        messages = self._arrived()
        if messages:
            return messages
        ready = dict(self._poller.poll(math.ceil(max(0.0, timeout_s * 1000))))
        if self._waker.fd in ready:
            self._waker.clear()
        for channel in self._channels:
            if channel.monitor in ready:
                channel.note_events()
        return self._arrived()

    def _arrived(self) -> list[tuple[int, Frames]]:
        return [(index, frames) for index, channel in enumerate(self._channels) for frames in _receive(channel.socket)]

    def is_open(self, channel: int) -> bool:
        """Return whether the channel is connected now."""
        self._channels[channel].note_events()
        return self._channels[channel].is_open

    def reopened(self) -> list[int]:
        """Return channels that have closed and connected again since the last call. Messages may be lost."""
        anew = [index for index, channel in enumerate(self._channels) if channel.reopened]
        for index in anew:
            self._channels[index].reopened = False
        return anew

    def refused(self, channel: int) -> str:
        """Return why the listener refuses this process; an empty string if it does not."""
        self._channels[channel].note_events()
        one = self._channels[channel]
        return one.reason if one.failures >= REFUSALS else ""

    def wake(self) -> None:
        """Make ``receive`` return now."""
        self._waker.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close all channels."""
        if self._closed:
            return
        self._closed = True
        for channel in self._channels:
            channel.close(int(linger_s * 1000))
        _terminate(self._context)
        self._waker.close()


def _terminate(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    # term() waits for lingering sockets, whose linger time is bounded.
    with contextlib.suppress(zmq.ZMQError):
        context.term()
