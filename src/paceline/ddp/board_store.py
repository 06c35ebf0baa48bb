"""The store of torch.distributed, kept by server 0 of the job.

PyTorch's ``TCPStore`` is a listener of rank 0 that anybody can write to. This one goes over the connections that the
process has already.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import default_pg_timeout

from paceline.torch_hooks.untraced import untraced
from paceline.wire import messages as m
from paceline.worker.session import Session


@untraced
class BoardStore(Store):
    """A store at server 0 of a job."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session, self._timeout = session, default_pg_timeout
        _stores.append(self)

    def _ask(
        self, verb: str, names: Sequence[str], values: Sequence[bytes] = (), timeout: timedelta | None = None
    ) -> m.BoardIs:
        found: list[m.Body] = []
        what = f"{verb} {', '.join(names)} in the store of torch.distributed"
        body = m.UseBoard(verb, list(names), list(values))
        call = self._session.ask_server(0, body, what, (), lambda answer, frames: found.append(answer))
        self._session.wait([call], (timeout or self._timeout).total_seconds())
        (answer,) = found
        assert isinstance(answer, m.BoardIs)
        return answer

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long to wait for keys."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it.

        Raises:
            DeadlineError: it was not set in time.
        """
        return self._ask("get", [key]).values[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number; returns the sum."""
        return self._ask("add", [key], [str(value).encode()]).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is as expected; returns the value after it."""
        return self._ask("swap", [key], [_bytes(expected), _bytes(desired)]).values[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._ask("check", keys).number)

    def delete_key(self, key: str) -> bool:
        """Delete a value; returns whether there was one."""
        return bool(self._ask("delete", [key]).number)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask("count", []).number

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DeadlineError: they do not in time.
        """
        self._ask("get", keys, timeout=timeout)

    def clone(self) -> BoardStore:
        """Return a store for another thread: this one, which any thread may use."""
        return self

    # torch.distributed asks through a ``PrefixStore``, in C++, with other names.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815


#: torch.distributed holds stores in C++, which does not keep their Python half alive.
_stores: list[BoardStore] = []


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
