"""Both sides of a connection prove that they hold the job's key, whatever is done to their messages."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from paceline.errors import AuthenticationError, PacelineError, RendezvousError
from paceline.net import handshake, noise
from paceline.net.handshake import GREETING_BYTES, Agreed, HandshakeError, Initiator, Responder, Seen, Way
from paceline.wire import messages, protocol

KEY, OTHER = bytes(range(32)), bytes(32)
TCP, UNIX = Way(False, "server 1"), Way(True, "server 1")


def shake(initiator: Initiator, responder: Responder) -> tuple[Agreed, Agreed]:
    join, mine = initiator.take(responder.take(initiator.hello()))
    assert responder.take(join) == b""
    assert responder.agreed is not None
    return mine, responder.agreed


@pytest.mark.parametrize("key", [KEY, b""])
def test_two_sides_agree_and_understand_each_other(key: bytes) -> None:
    mine, theirs = shake(Initiator(key, b"worker-1", True, TCP), Responder(key, True, TCP))
    assert theirs.identity == b"worker-1"
    assert theirs.receiving.open(mine.sending.seal(b"up")) == b"up"
    assert mine.receiving.open(theirs.sending.seal(b"down")) == b"down"


@pytest.mark.parametrize(
    ("asks", "wants", "way", "expected"),
    [
        (True, True, TCP, True),
        (True, False, TCP, True),
        (False, True, TCP, True),
        (False, False, TCP, False),
        (True, True, UNIX, False),
    ],
)
def test_large_frames_are_protected_as_soon_as_one_side_wants_it_beyond_its_host(
    asks: bool, wants: bool, way: Way, expected: bool
) -> None:
    mine, theirs = shake(Initiator(KEY, b"w", asks, way), Responder(KEY, wants, way))
    assert (mine.encrypts, theirs.encrypts) == (expected, expected)


@pytest.mark.parametrize(
    ("mine", "theirs"), [(TCP, UNIX), (UNIX, TCP), (TCP, Way(False, "server 2")), (TCP, Way(False, "scheduler"))]
)
@pytest.mark.parametrize("encrypt", [True, False])
def test_two_connections_that_somebody_joined_are_none(mine: Way, theirs: Way, encrypt: bool) -> None:
    """TCP that a relay leads to a unix socket, or to another listener of the job: neither side agrees to anything."""
    initiator, responder = Initiator(KEY, b"w", encrypt, mine), Responder(KEY, encrypt, theirs)
    with pytest.raises(HandshakeError, match="has joined two connections") as caught:
        responder.take(initiator.hello())
    assert not responder.proved
    with pytest.raises(HandshakeError, match="has joined two connections"):
        initiator.take(caught.value.reply)


def test_who_connects_over_a_network_accepts_no_less_than_it_asks_for() -> None:
    """Whatever a listener that holds the key says."""
    initiator, responder = Initiator(KEY, b"w", True, TCP), Responder(KEY, True, TCP)
    responder._is_unix = True
    with pytest.raises(HandshakeError, match="in the clear over a network"):
        initiator.take(responder.take(initiator.hello()))


def test_messages_have_one_size() -> None:
    hello = Initiator(KEY, b"w" * 63, True, TCP).hello()
    assert len(hello) == len(Responder(KEY, True, TCP).take(hello)) == GREETING_BYTES
    assert len(Initiator(b"", b"w", True, TCP).hello()) == GREETING_BYTES


def test_listener_refuses_another_key_and_says_so() -> None:
    responder = Responder(KEY, True, TCP)
    initiator = Initiator(OTHER, b"w", True, TCP)
    with pytest.raises(HandshakeError, match="the keys differ") as caught:
        responder.take(initiator.hello())
    assert not responder.proved
    with pytest.raises(HandshakeError, match="the keys differ"):
        initiator.take(caught.value.reply)


@pytest.mark.parametrize("key", [KEY, b""])
def test_a_process_of_another_release_is_refused_on_both_sides_and_told_so(
    key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    responder = Responder(key, True, TCP)
    with monkeypatch.context() as other:
        other.setattr(messages, "PROTOCOL", messages.PROTOCOL + 1)
        initiator = Initiator(key, b"w", True, TCP)
        hello, theirs = initiator.hello(), protocol()
    with pytest.raises(HandshakeError, match="install the same paceline everywhere") as caught:
        responder.take(hello)
    assert not responder.proved
    assert f"it speaks protocol {theirs[0]}.{theirs[1:].hex()}, this process {protocol()[0]}." in caught.value.reason
    with monkeypatch.context() as other:
        other.setattr(messages, "PROTOCOL", messages.PROTOCOL + 1)
        with pytest.raises(HandshakeError, match="install the same paceline everywhere"):
            initiator.take(caught.value.reply)


def test_the_caller_learns_whether_it_lacks_the_key_or_is_of_another_release() -> None:
    def told(error: HandshakeError) -> PacelineError:
        return error.for_caller("server 1")

    of_keys = told(HandshakeError("the keys differ"))
    assert isinstance(of_keys, AuthenticationError)
    assert "server 1 refuses this process: the keys differ. Start it with the job's own PACELINE_JOB_KEY" in str(
        of_keys
    )
    of_release = told(handshake.OtherProtocolError(b"\x02abcd"))
    assert isinstance(of_release, RendezvousError)
    assert "server 1 cannot be talked to: it speaks protocol 2.61626364, this process" in str(of_release)
    assert "KEY" not in str(of_release)


def test_what_is_no_greeting_is_no_process_of_paceline() -> None:
    with pytest.raises(HandshakeError, match="no process of paceline") as caught:
        Responder(KEY, True, TCP).take(b"GET / HTTP/1.1".ljust(GREETING_BYTES))
    assert caught.value.reply == b""


def test_who_connects_refuses_a_listener_without_the_key() -> None:
    """The impostor cannot read HELLO; whatever it answers, nothing else is sent to it."""
    initiator = Initiator(KEY, b"w", True, TCP)
    initiator.hello()
    impostor = Responder(OTHER, True, TCP)
    welcome = impostor.take(Initiator(OTHER, b"w", True, TCP).hello())
    with pytest.raises(HandshakeError, match="does not hold this job's key"):
        initiator.take(welcome)


@pytest.mark.parametrize(("mine", "theirs"), [(KEY, b""), (b"", KEY)])
def test_a_key_on_one_side_only_is_refused_on_both(mine: bytes, theirs: bytes) -> None:
    initiator = Initiator(mine, b"w", True, TCP)
    with pytest.raises(HandshakeError, match="one side uses a key") as caught:
        Responder(theirs, True, TCP).take(initiator.hello())
    with pytest.raises(HandshakeError, match="one side uses a key"):
        initiator.take(caught.value.reply)


def test_a_listener_without_a_key_is_refused_by_who_has_one() -> None:
    initiator = Initiator(KEY, b"w", True, TCP)
    initiator.hello()
    with pytest.raises(HandshakeError, match="one side uses a key"):
        initiator.take(Responder(b"", True, TCP).take(Initiator(b"", b"w", True, TCP).hello()))


@pytest.mark.parametrize("at", range(0, GREETING_BYTES, 3))
def test_a_changed_byte_anywhere_ends_the_handshake(at: int) -> None:
    def changed(message: bytes) -> bytes:
        return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]

    with pytest.raises(HandshakeError):
        Responder(KEY, True, TCP).take(changed(Initiator(KEY, b"w", True, TCP).hello()))
    initiator, responder = Initiator(KEY, b"w", True, TCP), Responder(KEY, True, TCP)
    welcome = responder.take(initiator.hello())
    with pytest.raises(HandshakeError):
        initiator.take(changed(welcome))
    initiator, responder = Initiator(KEY, b"w", True, TCP), Responder(KEY, True, TCP)
    join, _ = initiator.take(responder.take(initiator.hello()))
    with pytest.raises(HandshakeError):
        responder.take(changed(join))


def test_who_repeats_what_a_member_once_said_gets_no_further() -> None:
    member, first = Initiator(KEY, b"w", True, TCP), Responder(KEY, True, TCP)
    hello = member.hello()
    join, _ = member.take(first.take(hello))
    second = Responder(KEY, True, TCP)
    second.take(hello)
    assert second.agreed is None
    with pytest.raises(HandshakeError, match="repeats"):
        second.take(join)
    assert second.agreed is None


def test_a_hello_that_comes_again_is_refused_before_any_of_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    hello = Initiator(KEY, b"w", True, TCP).hello()
    Responder(KEY, True, TCP, seen).take(hello)
    again = Responder(KEY, True, TCP, seen)
    monkeypatch.setattr(noise.NoiseHandshake, "read_first", None)
    with pytest.raises(HandshakeError, match="repeats"):
        again.take(hello)
    assert not again.proved


def test_a_listener_remembers_so_many_hellos_and_none_that_a_stranger_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_SEEN", 3)
    seen = Seen()
    hellos = [Initiator(KEY, b"w", True, TCP).hello() for _ in range(4)]
    for one in hellos:
        Responder(KEY, True, TCP, seen).take(one)
    stranger = Initiator(OTHER, b"w", True, TCP).hello()
    with pytest.raises(HandshakeError, match="the keys differ"):
        Responder(KEY, True, TCP, seen).take(stranger)
    assert [one in seen for one in (*hellos, stranger)] == [False, True, True, True, False]


def test_a_public_key_that_is_none_is_refused() -> None:
    one = noise.NoiseHandshake(KEY, b"")
    message = bytes(32)
    sender = noise.NoiseHandshake(KEY, b"")
    sender._mix_psk()
    sender._mix_ephemeral(message)
    one.read_first(message + sender._encrypt(b"x"))
    with pytest.raises(noise.WrongKeyError, match="public key"):
        one.write_second(b"y")


def test_identity_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        Initiator(KEY, b"w" * 64, True, TCP)


def test_handshake_is_the_one_of_the_noise_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and keys that the package noiseprotocol 0.3.1 makes from the same secrets."""
    secrets = iter([bytes([1]) * 32, bytes([2]) * 32])
    make = X25519PrivateKey.from_private_bytes
    monkeypatch.setattr(noise.X25519PrivateKey, "generate", lambda: make(next(secrets)), raising=False)
    one, two = noise.NoiseHandshake(KEY, b"prologue"), noise.NoiseHandshake(KEY, b"prologue")
    first = one.write_first(b"first")
    assert two.read_first(first) == b"first"
    second = two.write_second(b"second")
    assert one.read_second(second) == b"second"
    assert one.split() == two.split()
    assert first.hex() == FIRST
    assert second.hex() == SECOND
    assert [key.hex() for key in one.split()] == KEYS


FIRST = "a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a2091779106ffc6c167dfb8ac77f6323f57299e247c0d2"
SECOND = "ce8d3ad1ccb633ec7b70c17814a5c76ecd029685050d344745ba05870e587d59a3303d4151e78d4b7982a4c5caa96f68cdb9f0c91927"
KEYS = [
    "fc6620e296d6a67ea9218281e562b90171249fce9142181a6fe2194deb21f8fe",
    "189a1e0941bf4814d435d50687968c1d3ecd6a87988973094258f33a04a2b0e9",
]
