"""The handshake ``Noise_NNpsk0_25519_AESGCM_SHA256`` of the Noise Protocol Framework, revision 34.

Both sides hold one secret, the job's key. Two messages give each connection fresh keys. Recorded traffic and the job's
key, got later, do not reveal them (forward secrecy).

| message | tokens | who reads it knows |
|---|---|---|
| initiator to responder | psk, e | that a holder of the key made it, perhaps long ago: it may be a replay |
| responder to initiator | e, ee | that a holder of the key answers this very connection |
| first record of the initiator | | the same of the initiator |
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"
_KEY_BYTES = 32
_TAG_BYTES = 16

#: Bytes of a message beyond its payload: a public key and a tag.
OVERHEAD = _KEY_BYTES + _TAG_BYTES


class WrongKeyError(Exception):
    """A message was not made with the same secret, or was changed on the way."""


def _hkdf(chaining_key: bytes, material: bytes, count: int) -> list[bytes]:
    secret = hmac.digest(chaining_key, material, "sha256")
    outputs: list[bytes] = []
    for number in range(1, count + 1):
        previous = outputs[-1] if outputs else b""
        outputs.append(hmac.digest(secret, previous + bytes([number]), "sha256"))
    return outputs


class NoiseHandshake:
    """One side of a handshake. Each of the two messages is made by one side and read by the other.

    Args:
        psk: the secret, 32 bytes.
        prologue: other facts on which both sides must agree.
    """

    def __init__(self, psk: bytes, prologue: bytes) -> None:
        self._psk = psk
        self._chaining_key = self._hash = _NAME
        self._key = b""
        self._nonce = 0
        self._own: X25519PrivateKey | None = None
        self._mix_hash(prologue)

    def write_first(self, payload: bytes) -> bytes:
        """Return the initiator's message."""
        self._mix_psk()
        return self._write_ephemeral() + self._encrypt(payload)

    def read_first(self, message: bytes) -> bytes:
        """Take the initiator's message; returns its payload.

        Raises:
            WrongKeyError: it was not made with the secret.
        """
        self._mix_psk()
        self._remote = message[:_KEY_BYTES]
        self._mix_ephemeral(self._remote)
        return self._decrypt(message[_KEY_BYTES:])

    def write_second(self, payload: bytes) -> bytes:
        """Return the responder's message.

        Raises:
            WrongKeyError: the initiator's public key is not one.
        """
        public = self._write_ephemeral()
        self._mix_shared(self._remote)
        return public + self._encrypt(payload)

    def read_second(self, message: bytes) -> bytes:
        """Take the responder's message; returns its payload.

        Raises:
            WrongKeyError: it was not made with the secret for this handshake.
        """
        remote = message[:_KEY_BYTES]
        self._mix_ephemeral(remote)
        self._mix_shared(remote)
        return self._decrypt(message[_KEY_BYTES:])

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys of the two directions: from the initiator, and to it."""
        first, second = _hkdf(self._chaining_key, b"", 2)
        return first, second

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def _mix_psk(self) -> None:
        self._chaining_key, mixed, key = _hkdf(self._chaining_key, self._psk, 3)
        self._mix_hash(mixed)
        self._key, self._nonce = key, 0

    def _write_ephemeral(self) -> bytes:
        self._own = X25519PrivateKey.generate()
        public = self._own.public_key().public_bytes_raw()
        self._mix_ephemeral(public)
        return public

    def _mix_ephemeral(self, public: bytes) -> None:
        self._mix_hash(public)
        self._mix_key(public)

    def _mix_shared(self, remote: bytes) -> None:
        assert self._own is not None
        try:
            self._mix_key(self._own.exchange(X25519PublicKey.from_public_bytes(remote)))
        except ValueError as error:
            raise WrongKeyError("a public key that is not one") from error

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, self._key = _hkdf(self._chaining_key, material, 2)
        self._nonce = 0

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _encrypt(self, payload: bytes) -> bytes:
        sealed = AESGCM(self._key).encrypt(self._next_nonce(), payload, self._hash)
        self._mix_hash(sealed)
        return sealed

    def _decrypt(self, sealed: bytes) -> bytes:
        try:
            payload = AESGCM(self._key).decrypt(self._next_nonce(), sealed, self._hash)
        except InvalidTag:
            raise WrongKeyError("a message of a handshake that was not made with this key") from None
        self._mix_hash(sealed)
        return payload

    def _next_nonce(self) -> bytes:
        nonce = self._nonce.to_bytes(12, "big")
        self._nonce += 1
        return nonce
