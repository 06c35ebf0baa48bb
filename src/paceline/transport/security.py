"""Who may connect: every job has one CURVE key pair, and only processes that hold it can open a connection.

| connection | with a job key | with a job key, ``encrypt`` off | without a job key (``insecure``) |
|---|---|---|---|
| to the scheduler | CURVE | CURVE | no protection |
| that carries tensors | CURVE | PLAIN, with a password derived from the key; not encrypted | no protection |
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

from paceline.config import Settings
from paceline.errors import ConfigError

_ANY_KEY = b"0" * 40


def new_job_key() -> str:
    """Return a new job key: a CURVE secret key, 40 characters of Z85."""
    return zmq.curve_keypair()[1].decode()


@dataclass(frozen=True)
class Security:
    """The key pair of a job, the same for all its processes. Who holds the secret key is let in.

    Raises:
        ConfigError: the job key is not a key.
    """

    job_key: str = field(repr=False)
    """Secret CURVE key, 40 characters of Z85. Empty: no authentication."""
    encrypt: bool = True
    """Encrypt connections that carry tensors, too."""

    def __post_init__(self) -> None:
        if self.job_key and len(self.job_key) != 40:
            raise ConfigError(
                f"the job key has {len(self.job_key)} characters, not 40; take it from the job's launcher"
            )
        try:
            zmq.curve_public(self.job_key.encode() or _ANY_KEY)
        except (ValueError, zmq.ZMQError) as error:
            raise ConfigError(f"the job key is not a CURVE key ({error}); take it from the job's launcher") from None

    @classmethod
    def of(cls, settings: Settings) -> Security:
        """Return the security that the settings ask for."""
        return cls("" if settings.insecure else settings.job_key, settings.encrypt)

    @property
    def public(self) -> bytes:
        """The job's public key."""
        return zmq.curve_public(self.job_key.encode())

    def _password(self) -> bytes:
        return hmac.new(self.job_key.encode(), b"paceline tensors", hashlib.sha256).hexdigest().encode()

    def _is_plain(self, bulk: bool) -> bool:
        return bulk and not self.encrypt

    def protect_listener(self, socket: zmq.Socket[bytes], bulk: bool) -> ThreadAuthenticator | None:
        """Let only holders of the key connect; returns the authenticator, to be stopped when the listener closes."""
        if not self.job_key:
            return None
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        if self._is_plain(bulk):
            socket.plain_server = True
            authenticator.configure_plain(domain="*", passwords={"paceline": self._password().decode()})
            return authenticator
        socket.curve_secretkey, socket.curve_publickey = self.job_key.encode(), self.public
        socket.curve_server = True
        authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyMembers(self.public))
        return authenticator

    def protect_channel(self, socket: zmq.Socket[bytes], bulk: bool) -> None:
        """Prove to hold the key on connecting, and accept only a listener that proves it too."""
        if not self.job_key:
            return
        if self._is_plain(bulk):
            socket.plain_username, socket.plain_password = b"paceline", self._password()
            return
        socket.curve_serverkey = socket.curve_publickey = self.public
        socket.curve_secretkey = self.job_key.encode()


class _OnlyMembers:
    """Admits peers whose public key is the job's."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)
