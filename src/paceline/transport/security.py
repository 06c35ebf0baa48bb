"""Who may talk: every job has one key, and only its holders can open a connection."""

from __future__ import annotations

import base64
import hashlib
import secrets
import string
from dataclasses import dataclass, field

from paceline.config import Settings
from paceline.errors import ConfigError

_BASE85 = string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85, _FROM_Z85 = str.maketrans(_BASE85, _Z85), str.maketrans(_Z85, _BASE85)


def new_job_key() -> str:
    """Return a new job key: 32 random bytes, written as 40 characters of Z85."""
    return base64.b85encode(secrets.token_bytes(32)).decode().translate(_TO_Z85)


@dataclass(frozen=True)
class Security:
    """The key of a job. Everybody who holds it is a member.

    Raises:
        ConfigError: the job key is not a key.
    """

    job_key: str = field(repr=False)
    """Empty: no authentication at all."""
    encrypt: bool = True
    """False: large frames are neither encrypted nor protected against changes; all else is, and both sides still prove
    that they hold the key. They are protected as soon as one of two sides asks for it."""

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
    def psk(self) -> bytes:
        """The secret of connections, 32 bytes; empty without a key."""
        if not self.job_key:
            return b""
        return hashlib.sha256(b"paceline connections " + self.job_key.encode()).digest()
