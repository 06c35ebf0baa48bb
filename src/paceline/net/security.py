"""Every job has one key, and only processes that hold it can open a connection.

| frames | with a job key | with a job key, ``encrypt`` off | without a job key (``insecure``) |
|---|---|---|---|
| heads and bodies of messages, and frames in heads | AES-GCM | AES-GCM | no protection |
| large frames (tensors) over TCP | AES-GCM | no protection | no protection |
| sealed frames (objects that are unpickled) | AES-GCM | AES-GCM | no objects are sent |
| large frames over unix sockets | the kernel | the kernel | the kernel |

A unix socket joins processes of one user only, so that no other user stands between them.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import socket
import string
import struct
from dataclasses import dataclass, field

from paceline.config import Settings
from paceline.errors import ConfigError

_BASE85 = string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85, _FROM_Z85 = str.maketrans(_BASE85, _Z85), str.maketrans(_Z85, _BASE85)


_UCRED = struct.Struct("=iII")


def is_of_another_user(sock: socket.socket) -> bool:
    """Tell whether a process of another user is at the other end of a connected unix socket.

    It is the one that listened, or that connected. False for other sockets, and where the kernel does not tell.
    """
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return False
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid != os.geteuid())


def new_job_key() -> str:
    """Return a new job key: 32 random bytes, written as 40 characters of Z85."""
    return encode_key(secrets.token_bytes(32))


def encode_key(secret: bytes) -> str:
    """Return 32 secret bytes as a job key."""
    return base64.b85encode(secret).decode().translate(_TO_Z85)


@dataclass(frozen=True)
class Security:
    """The key of a job, the same for all its processes. Its holders are let in.

    Raises:
        ConfigError: the job key is not a key.
    """

    job_key: str = field(repr=False)
    """32 random bytes as 40 characters of Z85. Empty: no authentication."""
    encrypt: bool = True
    """Protect tensors, too. They are protected as soon as one of the two sides of a connection asks for it."""

    def __post_init__(self) -> None:
        if self.job_key and len(self.job_key) != 40:
            raise ConfigError(
                f"the job key has {len(self.job_key)} characters, not 40; take it from the job's launcher"
            )
        try:
            if set(self.job_key) - set(_Z85):
                raise ValueError("a character that no key has")
            base64.b85decode(self.job_key.translate(_FROM_Z85))
        except ValueError as error:
            raise ConfigError(f"the job key is not a key ({error}); take it from the job's launcher") from None

    @classmethod
    def of(cls, settings: Settings) -> Security:
        """Return the security that the settings ask for."""
        return cls("" if settings.insecure else settings.job_key, settings.encrypt)

    @property
    def weakness(self) -> str:
        """The missing protection of this job from its network, for a warning; empty when all is protected."""
        if not self.job_key:
            return "this job has no key: whoever reaches its ports can read and change everything (PACELINE_INSECURE=1)"
        if not self.encrypt:
            return "tensors are sent in the clear: the network can read and change them (PACELINE_ENCRYPT=0)"
        return ""

    def check_objects(self) -> None:
        """Refuse to send or take objects, which are pickled, where anybody could send them.

        Raises:
            ConfigError: the job has no key.
        """
        if not self.job_key:
            raise ConfigError(
                "objects are pickled: whoever sends one can run code in all ranks. This job has no key "
                "(PACELINE_INSECURE=1, here or in rank 0), so anybody could; start it with a key, or send tensors"
            )

    @property
    def psk(self) -> bytes:
        """The secret of connections, 32 bytes; empty without a key."""
        return self._derived(b"paceline connections ")

    @property
    def value_key(self) -> bytes:
        """The key of values that are left where others can write, 32 bytes; empty without a key."""
        return self._derived(b"paceline values ")

    def _derived(self, purpose: bytes) -> bytes:
        return hashlib.sha256(purpose + self.job_key.encode()).digest() if self.job_key else b""
