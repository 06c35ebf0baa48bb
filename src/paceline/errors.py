"""The exception tree.

A caller's wrong argument is a ``ValueError`` or ``TypeError``. Everything else that can go wrong derives from
:class:`PacelineError`, and its text says what happened, to whom, after how long, and what to do.
"""

from __future__ import annotations


class PacelineError(RuntimeError):
    """Base of every error that paceline raises for something other than a wrong argument."""


class ConfigError(PacelineError):
    """A setting (argument, environment variable or file) is missing or contradicts another one."""


class AuthenticationError(PacelineError):
    """A peer could not prove that it holds the key of this job."""


class RendezvousError(PacelineError):
    """A process could not join the job: refused, duplicate, or not everybody came in time."""


class DeadlineError(PacelineError, TimeoutError):
    """A wait reached its deadline. The text names who was waited for."""


class PeerDiedError(PacelineError):
    """Another process of the job died. The text names its role, rank and host."""


class JoinTimeoutError(RendezvousError, PeerDiedError):
    """Another process of the job did not join in time, or the scheduler did not answer. The text names it."""


class RemoteError(PacelineError):
    """A server or the scheduler refused a request, or failed while it worked on it."""


class ProtocolError(PacelineError):
    """A message could not be understood. It is refused and changes nothing."""


class KeyMismatchError(PacelineError):
    """A key is unknown, initialised twice, or has another shape or dtype than on the other workers."""


class DataError(PacelineError):
    """A data set is missing or damaged. The text says where to put it."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or cannot be read: the text says which file, and why. Nothing was changed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class LaunchError(PacelineError):
    """A job could not be started, or one of its processes failed."""


class StaleGradientError(PacelineError):
    """A parameter was about to be updated with a gradient that backward has not refreshed."""


class NonFiniteError(PacelineError):
    """Gradients are NaN or Inf. The text names the parameter, the worker and the round."""
