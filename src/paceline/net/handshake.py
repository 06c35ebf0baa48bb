"""How a connection begins. Pure but for fresh keys.

| step | initiator | responder |
|---|---|---|
| 1 | sends HELLO | refuses another protocol, a process without the key, or a HELLO again; else sends WELCOME |
| 2 | checks WELCOME, sends JOIN, is connected | waits |
| 3 | | opens JOIN, is connected: a HELLO alone may be a replay that is too old to be recognised |

All three have a fixed size, so that a connection of a stranger holds less than 100 bytes. In a job without a key the
messages have the same form, and prove nothing.

HELLO and WELCOME begin with the protocol of :func:`paceline.wire.protocol`, before anything that a release may change,
so a process of another release is told so. That, and their size, must stay as they are in all releases.

Both sides must see the same :class:`Way`, which is Noise's prologue: a relay that joins one connection with another,
such as TCP with a unix socket of the listener's host, or with another listener of the job, ends the handshake. A unix
socket leaves large frames to the kernel; only a side whose own socket is one accepts that.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import AuthenticationError, PacelineError, RendezvousError
from paceline.net import noise
from paceline.net.aead import AesGcm, Cipher, NoCipher, TamperedError
from paceline.wire import PROTOCOL_BYTES, protocol

_MAGIC = b"PCL"
_KEYED, _KEYLESS, _WRONG_KEY, _WRONG_MODE, _OTHER_PROTOCOL = b"K", b"N", b"W", b"M", b"P"
_OPENING_BYTES = len(_MAGIC) + PROTOCOL_BYTES
_PROTOCOL = b"paceline connection 1"

#: Size of HELLO and WELCOME: the protocol, the kind, one byte of wishes, and Noise's overhead.
GREETING_BYTES = _OPENING_BYTES + 1 + 1 + noise.OVERHEAD
#: Most characters of an identity.
MAX_IDENTITY_BYTES = 63
_JOIN_BYTES = 1 + MAX_IDENTITY_BYTES

_ENCRYPT = 1

#: HELLOs that a listener recognises when they come again. More connections than members make in a long time.
MAX_SEEN = 4096
_REPEATED = "it repeats what somebody else once said"
_WRONG = "the keys differ, or something between both has joined two connections"


class HandshakeError(Exception):
    """The other side cannot be talked to.

    Args:
        reason: for messages.
        reply: bytes to send before the connection closes.
    """

    def __init__(self, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reason, self.reply = reason, reply

    def for_caller(self, whom: str) -> PacelineError:
        """Return the error of a request to a listener that refuses this process."""
        return AuthenticationError(
            f"{whom} refuses this process: {self.reason}. Start it with the job's own PACELINE_JOB_KEY "
            "(paceline launch sets it), and PACELINE_INSECURE equal everywhere"
        )


class OtherProtocolError(HandshakeError):
    """The other side is a process of another release, whose messages this one cannot read."""

    def __init__(self, theirs: bytes) -> None:
        both = f"it speaks protocol {_shown(theirs)}, this process {_shown(protocol())}"
        super().__init__(f"{both}; install the same paceline everywhere", _refusal(_OTHER_PROTOCOL))

    def for_caller(self, whom: str) -> PacelineError:
        """Return the error of a request to a listener of another release."""
        return RendezvousError(f"{whom} cannot be talked to: {self.reason}")


def _shown(protocol: bytes) -> str:
    return f"{protocol[0]}.{protocol[1:].hex()}"


@dataclass(frozen=True)
class Way:
    """The facts that both sides must know of their connection.

    Attributes:
        is_unix: this side's socket is a unix socket, which does not leave the host; else TCP.
        listener: role and rank of the listening side, as in ``server 1``.
    """

    is_unix: bool
    listener: str

    @property
    def prologue(self) -> bytes:
        """The bytes that the handshake binds."""
        return b"\0".join([_PROTOCOL, b"unix" if self.is_unix else b"tcp", self.listener.encode()])


@dataclass(frozen=True)
class Agreed:
    """The outcome of a handshake.

    Attributes:
        identity: the listener's name for the initiator.
        sending: protects records of this side.
        receiving: protects records of the other side.
        encrypts: large frames are protected too.
    """

    identity: bytes
    sending: Cipher
    receiving: Cipher
    encrypts: bool


def _opening() -> bytes:
    return _MAGIC + protocol()


def _refusal(why: bytes) -> bytes:
    return (_opening() + why).ljust(GREETING_BYTES, b"\0")


def _parts(greeting: bytes) -> tuple[bytes, bytes]:
    """Return kind and body of HELLO or WELCOME.

    Raises:
        HandshakeError: its sender is no process of paceline, or one of another release.
    """
    if not greeting.startswith(_MAGIC):
        raise HandshakeError("it is no process of paceline")
    if not greeting.startswith(_opening()):
        raise OtherProtocolError(greeting[len(_MAGIC) : _OPENING_BYTES])
    return greeting[_OPENING_BYTES : _OPENING_BYTES + 1], greeting[_OPENING_BYTES + 1 :]


class Initiator:
    """The connecting side.

    Args:
        psk: 32 bytes; empty for a job without a key.
        identity: the other side's name for this one.
        encrypt: whether large frames must be protected, unless the way is a unix socket.
        way: the connection, and the side that is meant.
    """

    def __init__(self, psk: bytes, identity: bytes, encrypt: bool, way: Way) -> None:
        if len(identity) > MAX_IDENTITY_BYTES:
            raise ValueError(f"an identity of {len(identity)} bytes; at most {MAX_IDENTITY_BYTES} are possible")
        self._identity = identity
        self._wishes = bytes([_ENCRYPT * encrypt])
        self._needs = encrypt and not way.is_unix
        self._noise = noise.NoiseHandshake(psk, way.prologue) if psk else None

    def hello(self) -> bytes:
        """Return the first message."""
        if self._noise is None:
            return (_opening() + _KEYLESS + self._wishes).ljust(GREETING_BYTES, b"\0")
        return _opening() + _KEYED + self._noise.write_first(self._wishes)

    def take(self, welcome: bytes) -> tuple[bytes, Agreed]:
        """Take WELCOME; returns JOIN and the agreement.

        Raises:
            HandshakeError: the other side does not hold the key, refuses this one, or would protect less.
        """
        kind, body = _parts(welcome)
        if kind == _WRONG_KEY:
            raise HandshakeError(_WRONG)
        if kind != (_KEYLESS if self._noise is None else _KEYED):
            raise HandshakeError("one side uses a key and the other does not")
        agreed = self._agree(body)
        join = bytes([len(self._identity)]) + self._identity.ljust(MAX_IDENTITY_BYTES, b"\0")
        return agreed.sending.seal(join), agreed

    def _agree(self, body: bytes) -> Agreed:
        if self._noise is None:
            return Agreed(self._identity, NoCipher(), NoCipher(), False)
        try:
            wishes = self._noise.read_second(body)
        except noise.WrongKeyError:
            raise HandshakeError("it does not hold this job's key") from None
        encrypts = bool(wishes[0] & _ENCRYPT)
        if self._needs and not encrypts:
            raise HandshakeError("it would send tensors in the clear over a network")
        sending, receiving = self._noise.split()
        return Agreed(self._identity, AesGcm(sending), AesGcm(receiving), encrypts)


class Seen:
    """The last HELLOs that held the key. A member sends none twice; a stranger can only repeat one that it recorded."""

    def __init__(self) -> None:
        self._hellos: dict[bytes, None] = {}

    def __contains__(self, hello: bytes) -> bool:
        """Tell whether a HELLO came before."""
        return hello in self._hellos

    def add(self, hello: bytes) -> None:
        """Note a HELLO that held the key; forgets the oldest of too many."""
        self._hellos[hello] = None
        if len(self._hellos) > MAX_SEEN:
            del self._hellos[next(iter(self._hellos))]


class Responder:
    """The listening side.

    Args:
        psk: 32 bytes; empty for a job without a key.
        encrypt: whether large frames must be protected, even if the initiator does not ask for it. Those of a unix
            socket never are.
        way: the connection, and this side's role and rank.
        seen: HELLOs that the listener has seen.

    Attributes:
        wanted: bytes that it waits for.
        agreed: the outcome, when the handshake is complete.
    """

    def __init__(self, psk: bytes, encrypt: bool, way: Way, seen: Seen | None = None) -> None:
        self._seen = Seen() if seen is None else seen
        self._noise = noise.NoiseHandshake(psk, way.prologue) if psk else None
        self._encrypt, self._is_unix = encrypt, way.is_unix
        self._ciphers: tuple[Cipher, Cipher] | None = None
        self.wanted = GREETING_BYTES
        self.agreed: Agreed | None = None

    @property
    def proved(self) -> bool:
        """Whether a holder of the key has made the bytes so far."""
        return self._ciphers is not None

    def take(self, message: bytes) -> bytes:
        """Take a message of the size that was wanted; returns the reply.

        Raises:
            HandshakeError: the other side is no member of the job.
        """
        if self._ciphers is None:
            return self._take_hello(message)
        sending, receiving = self._ciphers
        try:
            join = receiving.open(message)
        except TamperedError:
            raise HandshakeError(_REPEATED) from None
        self.agreed = Agreed(join[1 : 1 + join[0]], sending, receiving, self._encrypt)
        return b""

    def _take_hello(self, message: bytes) -> bytes:
        kind, body = _parts(message)
        if kind != (_KEYLESS if self._noise is None else _KEYED):
            raise HandshakeError("one side uses a key and the other does not", _refusal(_WRONG_MODE))
        if self._noise is None:
            self._ciphers, self._encrypt = (NoCipher(), NoCipher()), False
            self.wanted = _JOIN_BYTES
            return _refusal(_KEYLESS)
        if message in self._seen:
            raise HandshakeError(_REPEATED)
        reply = self._answer(self._noise, body)
        self._seen.add(message)
        to_here, from_here = self._noise.split()
        self._ciphers = AesGcm(from_here), AesGcm(to_here)
        self.wanted = _JOIN_BYTES + AesGcm.overhead
        return reply

    def _answer(self, one: noise.NoiseHandshake, body: bytes) -> bytes:
        try:
            wishes = one.read_first(body)
            self._encrypt = not self._is_unix and (self._encrypt or bool(wishes[0] & _ENCRYPT))
            return _opening() + _KEYED + one.write_second(bytes([_ENCRYPT * self._encrypt]))
        except noise.WrongKeyError:
            raise HandshakeError(_WRONG, _refusal(_WRONG_KEY)) from None
