"""A request in flight at its asker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from paceline.errors import PacelineError
from paceline.net.base import Frames
from paceline.net.errors_by_name import failed, rebuild
from paceline.wire import messages as m

OnAnswer: TypeAlias = Callable[[m.Body, Frames], None]
OnFailed: TypeAlias = Callable[[m.Failed], None]


class Call:
    """One request and what became of it.

    Args:
        whom: the peer, for messages: ``server 1 on 10.0.0.2``.
        what: the request, for messages: ``push of round 3``.
        on_answer: called with the body and the frames of an answer that is not a failure.
        on_failed: called with a failure.

    Attributes:
        channel: of the hub; -1 until a client has the call.
        seq: the number of the request; 0 until it has one.
        done: the answer has come and the callback has returned.
        body: the answer, unless it is a failure.
        error: what the peer answered, or what the callback raised. Whoever waits for the call raises it.
        crashed: ``error`` was raised by a callback.
    """

    __slots__ = ("_on_answer", "_on_failed", "body", "channel", "crashed", "done", "error", "seq", "what", "whom")

    def __init__(
        self, whom: str, what: str, on_answer: OnAnswer | None = None, on_failed: OnFailed | None = None
    ) -> None:
        self.whom, self.what = whom, what
        self.channel, self.seq = -1, 0
        self.done = self.crashed = False
        self.body: m.Body | None = None
        self.error: Exception | None = None
        self._on_answer, self._on_failed = on_answer, on_failed

    def complete(self, body: m.Body, frames: Frames) -> None:
        """Use the answer."""
        if isinstance(body, m.Failed):
            self.error = rebuild(body, self.whom)
            self._finish(self._on_failed, body)
        else:
            self.body = body
            self._finish(self._on_answer, body, frames)

    def fail(self, error: Exception) -> None:
        """End the call without an answer."""
        self.error = error
        self._finish(self._on_failed, failed(error))

    def _finish(self, callback: Callable[..., None] | None, *arguments: object) -> None:
        try:
            if callback is not None:
                callback(*arguments)
        except PacelineError as error:
            self._crash(type(error)(f"{self.what} at {self.whom}: {error}"))
        except Exception as error:  # noqa: BLE001 - thread border: the thread that waits for the call raises it
            self._crash(error)
        except BaseException as error:
            # Thread border: KeyboardInterrupt belongs to this thread. Who waits for the call learns that data may be
            # incomplete.
            self._crash(PacelineError(f"{self.what} at {self.whom}: {type(error).__name__} while its answer was used"))
            raise
        finally:
            # They refer to what keeps the call, so memory would wait for a garbage collection.
            self._on_answer = self._on_failed = None
            self.done = True

    def _crash(self, error: Exception) -> None:
        self.error, self.crashed = error, True

    def raise_error(self) -> None:
        """Raise the error of the call, once."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
