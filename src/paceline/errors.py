"""The exception tree.

A caller's wrong argument is a ``ValueError`` or ``TypeError``. Everything else that can go wrong derives from
:class:`PacelineError`. Its text says the event, the member, the time that passed, and the way out.
"""

from __future__ import annotations


class PacelineError(RuntimeError):
    """Base of every error that paceline raises for something other than a wrong argument."""


class ConfigError(PacelineError):
    """A setting (argument, environment variable or file) is missing, wrong, or contradicts another one."""


class MissingExtraError(PacelineError, ImportError):
    """An optional dependency is not installed. The text names the extra that installs it."""


class AuthenticationError(PacelineError):
    """A peer could not prove that it holds the key of this job."""


class RendezvousError(PacelineError):
    """A process could not join the job: it was refused, is a duplicate, or not all members came in time."""


class DeadlineError(PacelineError, TimeoutError):
    """A wait reached its deadline. The text names the members that it waited for."""


class PeerDiedError(PacelineError):
    """Another member of the job died. The text names its role, rank and host."""


class JoinTimeoutError(RendezvousError, PeerDiedError):
    """Another process of the job did not join in time, or the scheduler did not answer. The text names it."""


class JobOverError(RendezvousError):
    """The job has ended before this process could take over from the one that has died."""


class RemoteError(PacelineError):
    """A server or the scheduler refused a request, or failed while it worked on it."""


class ProtocolError(PacelineError):
    """A message is malformed or not allowed. It is refused and changes nothing."""


class KeyMismatchError(PacelineError):
    """A key is unknown, initialised twice, or has another shape or dtype than on the other workers."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written or read. The text names the file and the cause. No state was changed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint does not exist."""


class LaunchError(PacelineError):
    """A job could not be started, or one of its processes failed."""


class StaleGradientError(PacelineError):
    """A step would use a gradient that backward has not computed anew."""


class NonFiniteError(PacelineError):
    """Gradients are NaN or Inf. The text names the parameter, the worker and the round."""
