"""A remote shell over Ray: ``python -m paceline.launch.engines.ray_cluster.rsh SOCKET BUNDLE ARGV...``.

It runs a command in an actor of a bundle, as ``ssh HOST`` does on a host: its stdin, stdout and stderr are the
command's, and so is its exit code (255 if Ray failed; what Ray says is then on stderr).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from paceline.launch.engines.ray_cluster.frames import EXIT, OUT, unpack
from paceline.launch.shell import LOST, open_shell, run_shell, write


def main(words: Sequence[str]) -> int:
    """Run a command in an actor and return its exit code."""
    path, bundle, *argv = words
    try:
        with open_shell(path, json.dumps([int(bundle), argv]).encode()) as connection:
            for kind, data in unpack(connection):
                if kind == EXIT:
                    return int(data)
                write(1 if kind == OUT else 2, data)
        print("the Ray driver is gone", file=sys.stderr)
    except OSError as error:
        print(f"the Ray driver is gone: {error.strerror}", file=sys.stderr)
    return LOST


if __name__ == "__main__":
    run_shell(main)
