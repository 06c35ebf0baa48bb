"""Protection of records: AES-256-GCM with one key per connection and direction, and a counter as nonce.

A record that was changed, repeated, left out or moved does not open: its nonce is its place in the sequence, and the
records before it say what it is. Such a record ends the connection; the next one has fresh keys.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.errors import ProtocolError

#: Records under one key. With chunks of 1 MiB that is at most 2**32 blocks: an attacker's advantage is at most 2**-65.
RECORDS_PER_KEY = 1 << 16

_REKEY_NONCE = (2**64 - 1).to_bytes(12, "big")


class TamperedError(ProtocolError):
    """A record that does not open: changed, repeated, moved or cut on the way."""


class AesGcm:
    """The cipher of connections with a key: one direction. Each call is the next record.

    Args:
        key: 32 bytes, of this direction alone.
    """

    overhead = 16

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._count = 0

    def seal(self, data: bytes) -> bytes:
        """Return a record."""
        nonce = self._nonce()
        return self._cipher.encrypt(nonce, data, None)

    def seal_into(self, data: Any, buffer: memoryview) -> None:
        """Write a record to a buffer of its size."""
        nonce = self._nonce()
        self._cipher.encrypt_into(nonce, data, None, buffer)

    def open(self, record: Any) -> bytes:
        """Return the content of a record.

        Raises:
            TamperedError: it is not the record of this place.
        """
        nonce = self._nonce()
        try:
            return self._cipher.decrypt(nonce, record, None)
        except InvalidTag:
            raise self._tampered() from None

    def open_into(self, record: Any, buffer: memoryview) -> None:
        """Write the content of a record to a buffer of its size.

        Raises:
            TamperedError: it is not the record of this place.
        """
        nonce = self._nonce()
        try:
            self._cipher.decrypt_into(nonce, record, None, buffer)
        except InvalidTag:
            raise self._tampered() from None

    def _nonce(self) -> bytes:
        """Return the nonce of the next record; the cipher may be another one afterwards."""
        if self._count and self._count % RECORDS_PER_KEY == 0:
            # As Noise's REKEY: the old key cannot be worked out from the new one.
            self._cipher = AESGCM(self._cipher.encrypt(_REKEY_NONCE, bytes(32), b"")[:32])
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        return nonce

    def _tampered(self) -> TamperedError:
        return TamperedError(f"record {self._count - 1} was changed, repeated, moved or cut on the way")


def seal_value(key: bytes, value: bytes, purpose: bytes) -> bytes:
    """Return a value as only holders of a key can make and read it, for a place where others can write.

    Args:
        key: 32 bytes, for values alone.
        value: not to be read by others.
        purpose: use of the value. A value that was sealed for another purpose does not open.
    """
    nonce = os.urandom(12)
    return nonce + AESGCM(key).encrypt(nonce, value, purpose)


def open_value(key: bytes, sealed: bytes, purpose: bytes) -> bytes:
    """Return a value that :func:`seal_value` has sealed.

    Raises:
        TamperedError: no holder of the key has made it for this purpose.
    """
    try:
        return AESGCM(key).decrypt(sealed[:12], sealed[12:], purpose)
    except (InvalidTag, ValueError):
        raise TamperedError("nobody who holds the key has made this value") from None


class NoCipher:
    """Stands for the cipher in a job without a key."""

    overhead = 0

    def seal(self, data: bytes) -> bytes:
        """Return the data."""
        return data

    def seal_into(self, data: Any, buffer: memoryview) -> None:
        """Copy the data."""
        buffer[:] = data

    def open(self, record: Any) -> bytes:
        """Return the data."""
        return bytes(record)

    def open_into(self, record: Any, buffer: memoryview) -> None:
        """Copy the data."""
        buffer[:] = record


Cipher: TypeAlias = AesGcm | NoCipher
