"""The end of a job that only measures how long its workers compute."""

from __future__ import annotations

from paceline.hetero.files import report_text, steps_line, steps_text
from paceline.host.text_files import write_text
from paceline.worker.session import Session


class Profile:
    """Ends a worker when enough rounds are measured; worker 0 writes the speeds of all (``paceline profile``).

    Args:
        session: this worker's. Its settings name a file of speeds on worker 0's machine (``-``: it prints all that is
            known, for ``paceline up``), the number of rounds to measure, and a file of all steps there, if any.
    """

    def __init__(self, session: Session) -> None:
        self._session, settings = session, session.settings
        self._path, self._prints = settings.profile, settings.profile == "-"
        self._rounds, self._steps = settings.profile_rounds, settings.profile_steps

    def check(self) -> None:
        """End the process, with exit code 0, when enough rounds are measured. Called before every wait.

        Raises:
            SystemExit: this worker has measured enough, and so have all others.
        """
        session = self._session
        if session.pace.rounds < self._rounds:
            return
        session.before_wait = None
        session.stores.pause()
        me = session.workers[session.rank]
        line = f"{me.host}:{me.local_rank} {session.pace.seconds:.6g}\n"
        steps = steps_line(session.pace.steps) if self._steps or self._prints else ""
        said = [one.decode() for one in session.gather("paceline/profile", (line + steps).encode())]
        if session.rank == 0 and all(said) and self._prints:
            print(report_text(said, _update_s(session), session.stores.elements, session.kind.store_type), flush=True)
        elif session.rank == 0 and all(said):  # not if the script has ended on a worker before
            write_text(self._path, "".join(one.partition("\n")[0] + "\n" for one in said))
            if self._steps:
                lines = [one.partition("\n")[2] for one in said]
                write_text(self._steps, steps_text(lines, _update_s(session), hands_out=session.kind.hands_out))
        raise SystemExit(0)


def _update_s(session: Session) -> float:
    """Return how long servers that have measured themselves take to apply an update of all keys; 0: not known.

    This is the time of plain SGD on one thread of each. Other optimizers take a few times as long.
    """
    rate = sum(server.speed for server in session.servers)
    return session.stores.elements / rate if rate > 0 else 0.0
