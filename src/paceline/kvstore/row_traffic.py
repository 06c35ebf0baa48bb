"""Row-sparse pushes and pulls of one worker: row numbers and rows, to and from the server that owns the key."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.kvstore.block import Stretch, WorkerBlock
from paceline.kvstore.plan import Place
from paceline.kvstore.traffic import Traffic
from paceline.roles.session import Session
from paceline.tensors import from_frame, to_frame
from paceline.transport.base import Frames
from paceline.updaters.rows import sum_rows
from paceline.wire import messages as m


def own_bucket(place: Place) -> Stretch | None:
    """Return the bucket of a key that shares it with nobody and has rows, else None."""
    block, index = place
    stretches = block.stretches([index])
    bucket = block.layout.buckets[stretches[0].bucket]
    alone = len(stretches) == 1 and len(bucket.parts) == 1
    return stretches[0] if alone and len(block.spec.keys[index].shape) > 1 and block.numel(index) else None


class RowTraffic:
    """Sends rows to the servers, and brings rows from there.

    Args:
        session: this worker's part in the job.
        store: name of the store.
        traffic: of the dense values; it knows what a push weighs, and the optimizer's options.
    """

    def __init__(self, session: Session, store: str, traffic: Traffic) -> None:
        self._session, self._store, self._traffic = session, store, traffic

    def push(self, place: Place, values: Sequence[torch.Tensor]) -> None:
        """Push the sum of row-sparse values of a key that :func:`own_bucket` knows."""
        block, index = place
        one = self._free(place)
        total = sum_rows(values, torch.device("cpu"))
        [(start, length, round)] = block.buckets[one.bucket].rounds.next(one.start, one.length)
        entry = m.Entry(block.spec.block, one.bucket, start, length, round)
        weight, options = self._traffic.samples, self._traffic.options
        body = m.Push(self._store, [entry], weight, options, coded=False, want=False, shared=False, rows=True)
        frames = [to_frame(total.indices()[0].contiguous()), to_frame(total.values().contiguous())]
        self._session.note_round(round)
        ticket = self._session.ask_server(self._server(block, one), body, f"push of round {round}", frames)
        block.note_sent(one, ticket)
        block.fresh[index] = False

    def pull(self, place: Place, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of a key, given their ascending numbers, after this worker's own pushes of it are applied."""
        block, index = place
        one = self._free(place)
        shape = [rows.numel(), *block.spec.keys[index].shape[1:]]
        found = torch.empty(shape, dtype=block.dtype)

        def keep(body: m.Body, frames: Frames) -> None:
            found.view(-1).copy_(from_frame(frames[0], block.dtype, found.numel()))

        body = m.PullRows(self._store, m.Entry(block.spec.block, one.bucket, 0, one.length, 0))
        ids = [to_frame(rows.cpu().contiguous())]
        self._session.wait([self._session.ask_server(self._server(block, one), body, "pull of rows", ids, keep)])
        return found

    def _free(self, place: Place) -> Stretch:
        """Return the bucket of a key when none of its requests is under way."""
        one = own_bucket(place)
        assert one is not None, "checked before"
        self._session.wait(place[0].outstanding(one))
        return one

    def _server(self, block: WorkerBlock, one: Stretch) -> int:
        return block.layout.buckets[one.bucket].server
