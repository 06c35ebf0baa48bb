"""A remote shell to a container: ``python -m paceline.launch.engines.yarn.rsh SOCKET CONTAINER``.

It asks the hub for a container; then its stdin and stdout are those of the agent there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.launch.shell import LOST, READ_BYTES, open_shell, run_shell, write


def main(words: Sequence[str]) -> int:
    """Serve until the container is gone; return the exit code."""
    path, name = words
    try:
        with open_shell(path, name.encode()) as connection:
            while data := connection.recv(READ_BYTES):
                write(1, data)
    except OSError as error:
        print(f"the hub is gone: {error.strerror}", file=sys.stderr)
        return LOST
    return 0


if __name__ == "__main__":
    run_shell(main)
