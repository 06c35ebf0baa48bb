"""Row-sparse pushes and pulls of one worker: sends row numbers and rows to the owner of a key, and receives them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.errors import ProtocolError
from paceline.layout.tensors import from_frame, to_frame
from paceline.net.base import Frames
from paceline.net.call import Call, OnAnswer
from paceline.updaters.rows import check_numbers, of_rows, sum_rows
from paceline.wire import messages as m
from paceline.worker.call_plan import Place
from paceline.worker.session import Session
from paceline.worker.traffic import Carried, Traffic

_NO_ELEMENTS = torch.empty(0, dtype=torch.float32, device="cpu")


def own_bucket(place: Place) -> m.Span | None:
    """Return the bucket of a row-sparse key, which holds no other key; None for any other key."""
    block, index = place
    ranges = block.ranges([index])
    bucket = block.layout.buckets[ranges[0].bucket]
    alone = len(ranges) == 1 and len(bucket.parts) == 1
    return ranges[0] if alone and len(block.spec.keys[index].shape) > 1 and block.numel(index) else None


def _own_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return coalesced rows in CPU memory; they share no memory with the gradient."""
    own = gradient.detach().coalesce().cpu()
    return own.clone() if own.values().data_ptr() == gradient._values().data_ptr() else own


class RowExchange:
    """A push of rows of a key, or a request for them, that is answered with rows.

    Attributes:
        call: the call; wait for it with ``Session.wait``.
        sent: coalesced rows that were pushed, in CPU memory; None: absent or skipped.
        rows: rows of the answer, when the call is done: coalesced, in the shape of the key, in CPU memory. None: there
            is no merged gradient, because no worker had one.
    """

    call: Call

    def __init__(self, place: Place) -> None:
        self._block, self._index = place
        self.sent: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None

    def keep(self, body: m.Body, frames: Frames) -> None:
        """Store the rows of an answer.

        Raises:
            ProtocolError: the frames are not rows of the key.
        """
        if not frames:
            return
        shape = self._block.spec.keys[self._index].shape
        if len(frames) != 2:
            raise ProtocolError(f"an answer with rows has {len(frames)} frames")
        numbers = from_frame(frames[0], torch.int64, memoryview(frames[0]).nbytes // torch.int64.itemsize)
        check_numbers(numbers, shape[0])
        values = from_frame(frames[1], self._block.dtype, numbers.numel() * math.prod(shape[1:]))
        # Copied, because the memory of a message is shared and is reused later.
        self.rows = of_rows(numbers.clone(), values.clone().view(-1, *shape[1:]), (*shape,))


class RowTraffic:
    """Pushes rows to the servers, and pulls rows from them, beside the traffic of dense values."""

    def __init__(self, session: Session, store: str, traffic: Traffic) -> None:
        self._session, self._store, self._traffic = session, store, traffic

    def push(self, place: Place, values: Sequence[torch.Tensor], carried: Carried) -> None:
        """Push the sum of row-sparse values of a key that has a bucket of its own (:func:`own_bucket`)."""
        self._send(place, sum_rows(values, torch.device("cpu")), None, carried)
        place[0].fresh[place[1]] = False

    def exchange(self, place: Place, gradient: torch.Tensor | None, carried: Carried) -> RowExchange:
        """Push the rows of a key of ``DistStore.add_row_keys``; the answer brings rows. Does not wait.

        The gradient is row-sparse, in the shape of the key, on any device; it may change after this returns. None: this
        worker has no gradient. It takes part in the round, and its gradient counts as zeros unless no worker has one.
        """
        done = RowExchange(place)
        done.sent = None if gradient is None or carried.skip else _own_rows(gradient)
        done.call = self._send(place, done.sent, done.keep, carried)
        return done

    def news(self, place: Place) -> RowExchange:
        """Request the rows of a key that changed since this worker's last answer, without a push. Does not wait."""
        done = RowExchange(place)
        one = self._free(place)
        body = m.PullRows(self._store, m.Entry(*one.place, 0, one.length, 0))
        server = place[0].routes[one.bucket].owner
        done.call = self._session.ask_server(server, body, "pull of changed rows", (), done.keep)
        place[0].note_sent(one, done.call)
        return done

    def _send(self, place: Place, total: torch.Tensor | None, keep: OnAnswer | None, carried: Carried) -> Call:
        """Push coalesced rows; they must not change until the answer."""
        block, _ = place
        one = self._free(place)
        [(start, length, round)] = block.buckets[one.bucket].rounds.next(one.start, one.length)
        entry = m.Entry(*one.place, start, length, round)
        want, skip = keep is not None, carried.skip
        absent = [m.Span(*one.place, start, length)] if total is None and not skip else []
        body = m.Push(
            self._store, [entry], carried.samples, carried.options, False, want, False, rows=True, absent=absent,
            skip=skip,
        )  # fmt: skip
        parts = [_NO_ELEMENTS] * 2 if total is None else [total.indices()[0].contiguous(), total.values().contiguous()]
        frames = [] if skip else [to_frame(part) for part in parts]
        what = f"push of round {round} of rows of {block.spec.keys[place[1]].name!r}"
        server = block.routes[one.bucket].owner
        self._session.note_round(round, carried.rows)
        if self._traffic.clip_norm:
            self._traffic.note_unclipped(server, [entry])
        call = self._session.ask_server(server, body, what, frames, keep)
        block.note_sent(one, call)
        return call

    def pull(self, place: Place, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of a key, given their ascending numbers, after this worker's own pushes of it are applied."""
        block, index = place
        one = self._free(place)
        shape = [rows.numel(), *block.spec.keys[index].shape[1:]]
        found = torch.empty(shape, dtype=block.dtype, device="cpu")

        def keep(body: m.Body, frames: Frames) -> None:
            found.view(-1).copy_(from_frame(frames[0], block.dtype, found.numel()))

        body = m.PullRows(self._store, m.Entry(*one.place, 0, one.length, 0))
        ids = [to_frame(rows.cpu().contiguous())]
        server = block.routes[one.bucket].owner
        self._session.wait([self._session.ask_server(server, body, "pull of rows", ids, keep)])
        return found

    def _free(self, place: Place) -> m.Span:
        """Return the bucket of a key, after waiting for all requests on it."""
        one = own_bucket(place)
        assert one is not None, "checked before"
        self._session.wait(place[0].outstanding(one))
        return one
