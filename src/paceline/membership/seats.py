"""All members of a job, by role and rank and by their connections. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.config import Settings
from paceline.membership.actions import MemberKey
from paceline.membership.seat import Seat, without_token
from paceline.wire import messages as m


class Seats(Mapping[MemberKey, Seat]):
    """The members of a job by role and rank, in the order in which they joined.

    Args:
        settings: numbers of workers and servers.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_key: dict[MemberKey, Seat] = {}
        self._by_peer: dict[bytes, MemberKey] = {}

    def __getitem__(self, key: MemberKey) -> Seat:
        """Return a member that has joined."""
        return self._by_key[key]

    def __iter__(self) -> Iterator[MemberKey]:
        """Iterate over roles and ranks."""
        return iter(self._by_key)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._by_key)

    def add(self, seat: Seat) -> None:
        """Take in a member with its lifeline."""
        key = (seat.member.role, seat.member.rank)
        self._by_key[key] = seat
        self._by_peer[seat.peer] = key

    # ---- connections -------------------------------------------------------------------------------------------------

    def of(self, peer: bytes) -> MemberKey | None:
        """Return the member that a connection belongs to; None where it belongs to none."""
        return self._by_peer.get(peer)

    def of_member(self, peer: bytes) -> Seat:
        """Return the member that a connection is known to belong to."""
        return self._by_key[self._by_peer[peer]]

    def claim(self, peer: bytes, claim: m.Claim) -> bool:
        """Note a further connection of a member; False where the token is wrong."""
        seat = self.get((claim.role, claim.rank))
        if seat is None or seat.member.token != claim.token:
            return False
        self._by_peer[peer] = (claim.role, claim.rank)
        return True

    # ---- who is there ------------------------------------------------------------------------------------------------

    def missing(self) -> list[MemberKey]:
        """Return who has not joined yet, servers first."""
        wanted = (("server", self._settings.num_servers), ("worker", self._settings.num_workers))
        return [(role, rank) for role, number in wanted for rank in range(number) if (role, rank) not in self]

    def live(self) -> list[Seat]:
        """Return the members that have neither left nor died."""
        return [seat for seat in self.values() if seat.live]

    def of_role(self, role: str) -> list[Seat]:
        """Return the members of a role."""
        return [seat for (own, _), seat in self.items() if own == role]

    def expected(self) -> set[MemberKey]:
        """Return the workers that a barrier waits for."""
        return {("worker", seat.member.rank) for seat in self.of_role("worker") if not (seat.left or seat.gone)}

    # ---- for others --------------------------------------------------------------------------------------------------

    def known_to(self, key: MemberKey) -> list[m.Member]:
        """Return all members as one of them may know them: servers learn every token, workers only their own."""
        return [
            seat.member if key[0] == "server" or key == other else without_token(seat.member)
            for other, seat in sorted(self.items())
        ]

    def status(
        self,
        waits_for: Callable[[MemberKey], Sequence[int]],
        deaths: Sequence[m.Death],
        now: float,
        auto: Sequence[str] = (),
    ) -> m.Status:
        """Return who is there, how far, and since when not heard."""
        seats = sorted(self.items())
        return m.Status(
            [without_token(seat.member) for _, seat in seats],
            [seat.report(" ".join(map(str, waits_for(key))), now) for key, seat in seats],
            list(deaths),
            list(auto),
        )

    def check(self) -> None:
        """Assert what must always hold."""
        assert len({seat.peer for seat in self.values()}) == len(self), "two members share a lifeline"
        for (role, rank), seat in self.items():
            assert (seat.member.role, seat.member.rank) == (role, rank)
