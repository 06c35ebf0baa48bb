"""Watches whether this worker trains with the others: it tells the scheduler where it does not. See also membership.

| event in a worker of a job of several, or of one that measures its rounds | action |
|---|---|
| torch is imported, a store is made, or the job is joined | the watch begins |
| the first backward pass or step | the last loader that is under way is the one that the loop trains from |
| each of the first :data:`MAX_INPUTS` passes | note the checksums of its loss, and of the model's inputs |
| a later pass or step, :data:`JUDGE_AFTER_S` after the first | judge |
| the process ends well, and was not judged, or trained alone | judge |

| a judgement | tell | and then |
|---|---|---|
| nothing was exchanged | yes | watch on: a later exchange changes what is told at the end |
| exchanged; its loader walks a whole data set, or its model had unlike inputs | yes | the watch ends |
| exchanged; samples are divided, or not known | no | the watch ends |

A worker that has not joined tells over a connection of its own; where no scheduler is, it logs the line itself.
Children are not watched: they have the environment of their parent.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.config import Settings, from_environment
from paceline.errors import PacelineError
from paceline.host import forks
from paceline.torch_hooks.loaders import Walk, checksum_of, walk_of
from paceline.torch_hooks.training_events import TrainingEvents

if TYPE_CHECKING:
    from paceline.net.call import Call
    from paceline.wire import messages as m

#: How long a loop trains until it is judged. A first exchange after a longer time is rare.
JUDGE_AFTER_S = 5.0

#: Backward passes of a loop without a step of an optimizer, from which on it is none that sums gradients for one.
_LEAST_PASSES = 32

#: Parameters and first backward passes in which weights are compared, and changes without a step that are no accident.
_PARAMS, _COMPARED, _CHANGES = 4, 8, 3

#: Backward passes whose inputs of the model are compared: as many as a message carries.
MAX_INPUTS = 3

#: Walks of loaders that may be under way when the training begins.
_MAX_WALKS = 8

#: How long to wait for the scheduler's answer: at the end of the process, which waits for it, and in a thread.
_TELL_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Joined(Protocol):
    """A worker's session."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def round(self) -> int:
        """The last round that was pushed."""

    def ask_scheduler(self, body: m.Request, what: str) -> Call:
        """Send a request to the scheduler."""

    def wait(self, calls: list[Call], timeout_s: float) -> None:
        """Wait for the answers."""


class Watch:
    """The watch of this process.

    Attributes:
        session: this worker's session, once it has joined.
        store: type of the store that it has made last.
        exchanged: it has reduced with others, or uses a store that is not ours.
        weights: a part of the weights of its DistributedOptimizer; None: it has made none for several workers.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events: TrainingEvents | None = TrainingEvents(self)
        self._steps = self._passes = 0
        self._first: float | None = None
        self._group = ""
        """Backend of another process group at the first pass or step: it may be gone when the process ends."""
        self._walks: deque[weakref.ref[Any]] = deque(maxlen=_MAX_WALKS)
        """Iterators of loaders that have begun before the first pass or step."""
        self._walk = Walk()
        """Of the last one of them that was under way then."""
        self._inputs: list[int] = []
        """Checksums of the model's inputs before each of the first passes."""
        self._input: int | None = None
        """That of the calls since the last pass; None: there was none."""
        self._losses: list[int] = []
        """Checksums of the losses of the first passes."""
        self._has_told = False
        self._thread: threading.Thread | None = None
        self.session: Joined | None = None
        self.store, self.exchanged = "", False
        self.weights: SomeWeights | None = None
        forks.in_children(self, Watch._end)

    # ---- events ----------------------------------------------------------------------------------------------------

    def loader_begins(self, iterator: Any) -> None:
        """See :class:`paceline.torch_hooks.training_events.Listener`."""
        if self._first is None:
            self._walks.append(weakref.ref(iterator))

    def _find_walk(self) -> None:
        under_way = [one for one in (walk() for walk in self._walks) if one is not None]
        self._walks.clear()
        if under_way:
            try:
                self._walk = walk_of(under_way[-1])
            except Exception as error:  # noqa: BLE001 - border: a data set may raise anything when it is looked into
                logger.info("it is not known which samples %r walks: %r", under_way[-1], error)

    @property
    def wants_inputs(self) -> bool:
        """Whether inputs of the model are still to be compared."""
        return self._events is not None and len(self._inputs) < MAX_INPUTS

    def note_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note the inputs of a call of the model in training."""
        found = _checksum_of(inputs, self._input or 0)
        if found is None:
            self._inputs = [0] * MAX_INPUTS
        self._input = found

    def pass_begins(self, losses: Any) -> None:
        """See :class:`paceline.torch_hooks.training_events.Listener`."""
        self._passes += 1
        if self._passes <= MAX_INPUTS:
            loss = _checksum_of([losses] if isinstance(losses, torch.Tensor) else losses, 0)
            self._losses += [] if loss is None else [loss]
        if self._input is not None and self.wants_inputs:
            self._inputs.append(self._input)
        self._input = None
        if self.weights is not None and not self._steps and self._passes <= _COMPARED:
            self.weights.compare()
        self._trains()

    def stepped(self) -> None:
        """See :class:`paceline.torch_hooks.training_events.Listener`."""
        self._steps += 1
        self._trains()

    def _trains(self) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._find_walk()
            self._group = _foreign_group(min(2, self._settings.num_workers))
        if now - self._first >= JUDGE_AFTER_S and not self._has_told:
            self._judge()

    # ---- judgement -------------------------------------------------------------------------------------------------

    @property
    def _has_exchanged(self) -> bool:
        return self.exchanged or (self.session is not None and self.session.round > 0)

    @property
    def _is_unstepped(self) -> bool:
        return not self._steps and self.weights is not None and self.weights.changes >= _CHANGES

    def _is_alone(self, least_passes: int) -> bool:
        """Return whether it trains alone. Without a step the first passes may be those of one long step."""
        if not self._steps and (self._is_unstepped or self.weights is not None):
            return self._is_unstepped
        return not self._has_exchanged and (self._steps > 0 or self._passes >= least_passes)

    def _judge(self) -> None:
        is_alone = self._is_alone(_LEAST_PASSES)
        if not is_alone and max(self._passes, self._steps) <= MAX_INPUTS:
            return  # inputs are still to come
        if is_alone or (self._has_exchanged and self._knows_samples):
            self._has_told = True
            if self.session is None:
                self._thread = threading.Thread(target=self._tell, name="paceline-alone", daemon=True)
                self._thread.start()
            else:
                self._tell(waits=False)
        if self._has_exchanged and not is_alone:
            self._end()

    @property
    def _knows_samples(self) -> bool:
        """Whether there is something to compare with other workers' samples."""
        return bool(self._walk.data) or self._inputs_differ

    @property
    def _inputs_differ(self) -> bool:
        """Whether the model had unlike inputs: the same ones again and again, as a whole graph, tell nothing."""
        return len(set(self._inputs)) > 1

    def _end(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def finish(self) -> None:
        """Tell the last word, before this process leaves the job or ends."""
        if self._thread is not None:  # none may live when the interpreter ends
            self._thread.join(2 * _TELL_TIMEOUT_S)
        trains = self._first is not None
        if self._events is not None and (self._has_told or self._is_alone(1) or (trains and self._knows_samples)):
            self._tell()
        self._end()

    def _told(self) -> m.Training:
        from paceline.wire import messages as m

        return m.Training(
            self._settings.rank if self.session is None else self.session.rank,
            self.store,
            self._group,
            self.weights is not None,
            self._steps,
            self._passes,
            self._has_exchanged,
            self._is_unstepped,
            *self._walk,
            self._inputs if self._inputs_differ else [],
            list(self._losses),
        )

    def _tell(self, waits: bool = True) -> None:
        """Tell the scheduler. The training goes on where it does not hear it."""
        told = self._told()
        try:
            if self.session is not None:
                call = self.session.ask_scheduler(told, _WHAT)
                if waits:
                    self.session.wait([call], _TELL_TIMEOUT_S)
            elif self._settings.scheduler and told.rank >= 0:
                _tell_by_itself(self._settings, told)
            else:
                self._log(told)
        except (PacelineError, OSError) as error:
            logger.info("the scheduler has not heard how this worker trains: %s", error)
            self._log(told)

    def _log(self, told: m.Training) -> None:
        from paceline.membership.alone import alone_line

        line = alone_line(told)
        if line and told.rank <= 0:
            logger.warning("%s", line)


class SomeWeights:
    """Some elements of a DistributedOptimizer's parameters, which only its steps should change."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = [weakref.ref(one) for one in params if one.requires_grad][:_PARAMS]
        self._before: list[torch.Tensor | None] = []
        self.changes = 0
        """Backward passes before which they had changed since the pass before."""

    def compare(self) -> None:
        """Compare them with those at the call before."""
        params = [one() for one in self._params]
        now = [None if one is None or not one.numel() else one.detach().flatten()[:1].clone() for one in params]
        before, self._before = self._before, now
        for one, other in zip(before, now, strict=False):
            if one is not None and other is not None and not torch.equal(one, other):
                self.changes += 1
                return


def _checksum_of(tensors: Iterable[torch.Tensor], before: int) -> int | None:
    """Return the checksum of tensors; None: they cannot be read."""
    try:
        return checksum_of(tensors, before)
    except Exception as error:  # noqa: BLE001 - border: subclasses of tensors may raise anything
        logger.info("inputs or losses cannot be compared: %r", error)
        return None


_WHAT = "telling how this worker trains"


def _tell_by_itself(settings: Settings, told: m.Training) -> None:
    """Tell the scheduler over a connection of its own: this worker has not joined."""
    from paceline.net import Security
    from paceline.net.client import Client
    from paceline.net.sockets import SocketHub

    hub = SocketHub(Security.of(settings))

    def check() -> None:
        if hub.is_deserted(channel):
            raise PacelineError(f"no process listens at {settings.scheduler}")

    client = Client(hub, check=check)
    try:
        channel = client.connect(settings.scheduler, "worker", "scheduler", f"at {settings.scheduler}")
        if client.wait([client.ask(channel, told, _WHAT)], _TELL_TIMEOUT_S) is not None:
            raise PacelineError(f"the scheduler did not answer within {_TELL_TIMEOUT_S:g} s")
    finally:
        client.close()


def _foreign_group(least: int) -> str:
    """Return the backend of torch.distributed's process group, if it has so many processes and is not ours."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < least:
        return ""
    name = str(dist.get_backend())
    return "" if name == "paceline" else name


# ---- the watch of this process --------------------------------------------------------------------------------------

_watch: Watch | None = None
_lock = threading.Lock()


def begin() -> None:
    """Begin to watch, in a worker of a job of several, or of one that measures its rounds. Idempotent."""
    global _watch
    process = sys.modules.get("multiprocessing.process")  # every child of multiprocessing has it
    with _lock:
        if _watch is not None or (process is not None and process.parent_process() is not None):
            return
        try:
            settings = from_environment()
        except PacelineError:  # whoever uses them gets the error
            return
        if settings.role != "worker" or (settings.num_workers < 2 and not settings.profile):
            return
        _watch = Watch(settings)
        atexit.register(finish)


def note_store(kind: str) -> None:
    """Note that this process has made a store. One of several workers counts more than one of this process."""
    begin()
    if _watch is not None and not _watch.store.startswith("dist_"):
        _watch.store = kind


def note_exchange() -> None:
    """Note that this process has reduced values with others."""
    if _watch is not None:
        _watch.exchanged = True


def note_walk(iterator: Any) -> None:
    """Note that a loader that is none of torch begins to be walked; see :func:`.loaders.walk_of`."""
    if _watch is not None:
        _watch.loader_begins(iterator)


def wants_inputs() -> bool:
    """Return whether inputs of the model are to be noted: of its first calls only."""
    return _watch is not None and _watch.wants_inputs


def note_inputs(inputs: Iterable[torch.Tensor]) -> None:
    """Note the inputs of a call of the model in training."""
    if _watch is not None:
        _watch.note_inputs(inputs)


def note_optimizer(params: Sequence[torch.Tensor]) -> None:
    """Note that this process has made a DistributedOptimizer of a store of several workers."""
    if _watch is not None:
        _watch.weights = SomeWeights(params)


def joined(session: Joined | None) -> None:
    """Note that this process has joined the job; None: it leaves."""
    begin()
    if _watch is not None:
        _watch.session = session


def finish() -> None:
    """Tell the last word, if the process ends well."""
    if _watch is not None and getattr(sys, "last_value", None) is None:
        _watch.finish()


begin()  # `import torch` has asked for it too early, if this module was the first to import torch
