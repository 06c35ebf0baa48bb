"""Requests that read values, or set them outside of any round."""

from __future__ import annotations

from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.server import rows
from paceline.server.answers import send_known, send_values
from paceline.server.asker import Asker, Handlers, Result
from paceline.server.hosted import HostedStores
from paceline.server.push_request import Known
from paceline.server.release import show
from paceline.tensors import from_frame, to_frame
from paceline.wire import messages as m


class Pulls:
    """Handles reads of a server's own buckets.

    Args:
        stores: of this server.
    """

    def __init__(self, stores: HostedStores) -> None:
        self._stores = stores
        self.of_workers: Handlers = {
            m.Pull: self._pull,
            m.PullRows: self._pull_rows,
            m.SetValues: self._set_values,
        }

    def _pull(self, asker: Asker, pull: m.Pull, frames: Frames) -> None:
        own, worker = self._stores[pull.store].own, asker.rank
        store = own.store
        buckets = [store.buckets.checked(entry) for entry in pull.entries]
        for entry, bucket in zip(pull.entries, buckets, strict=True):
            if pull.shared and worker not in bucket.arenas:
                raise ProtocolError(f"worker {worker} has not offered shared memory for block {entry.block}")
        if not pull.shared and "pull" not in own.codecs:
            send_values(asker, store, worker, pull.entries)
            return
        versions, known = list[int](), list[Known]()
        for entry, bucket in zip(pull.entries, buckets, strict=True):
            versions.append(store.read(worker, entry)[0])
            if pull.shared:
                show(bucket, worker, store.units[worker], entry.start, entry.length)
            if "pull" in own.codecs:
                known += bucket.tell_range(worker, entry.start, entry.length, pull.shared)
        send_known(asker, store, versions, known)

    def _pull_rows(self, asker: Asker, body: m.PullRows, frames: Frames) -> Result:
        store, worker, entry = self._stores[body.store].own.store, asker.rank, body.entry
        bucket = store.buckets.get(entry.block, entry.bucket)
        if not frames and bucket.answers is not None and bucket.answers.stores_value:
            store.buckets.checked(entry)
            version, values = store.read(worker, entry)
            return m.Values([version]), rows.taken(bucket, worker, version, values)
        if len(frames) != 1 or (bucket.answers is not None and not bucket.answers.stores_value):
            raise ProtocolError(f"a pull of rows with {len(frames)} frames of row numbers makes no sense here")
        chosen = rows.numbers(bucket, entry, frames[0])
        version, values = store.read(worker, entry)
        return m.Values([version]), [to_frame(values.view(rows.shape_of(bucket, entry))[chosen])]

    def _set_values(self, asker: Asker, body: m.SetValues, frames: Frames) -> m.Reply:
        store = self._stores[body.store].own.store
        if len(frames) != len(body.entries):
            raise ProtocolError(f"{len(body.entries)} entries with {len(frames)} frames of values")
        buckets = [store.buckets.checked(entry) for entry in body.entries]
        triples = zip(buckets, body.entries, frames, strict=True)
        values = [from_frame(frame, bucket.values.dtype, entry.length) for bucket, entry, frame in triples]
        for bucket, entry, new in zip(buckets, body.entries, values, strict=True):
            bucket.overwrite(entry.start, new)
        return m.Done()
