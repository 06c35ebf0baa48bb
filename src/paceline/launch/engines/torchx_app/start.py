"""Start one process of a TorchX job: what only the replica knows becomes its environment, then it becomes the command.

``python -m paceline.launch.engines.torchx_app.start JSON APP_ID REPLICA RANK0_VARIABLE COMMAND...``
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import config
from paceline.launch.plan import Late, address_parts
from paceline.net.security import encode_key

START = "paceline.launch.engines.torchx_app.start"

#: Late values that :func:`environment` knows. The pipes to the launcher do not exist, and retries are TorchX's own.
FILLED_IN = frozenset({Late.BIND, Late.SCHEDULER, Late.SCHEDULER_HOST, Late.SCHEDULER_PORT, Late.JOB_KEY})

_RANK = config.variable("rank")


def main(words: Sequence[str]) -> int:
    """Become the command. Returns only if that is not possible."""
    text, app_id, replica, rank0_variable, *argv = words
    try:
        env = environment(json.loads(text), app_id, int(replica), os.environ.get(rank0_variable, ""))
        os.execvpe(argv[0], argv, {**os.environ, **env})
    except OSError as error:
        print(f"{error.filename or argv[0]}: {error.strerror}", file=sys.stderr)
    return 127


def environment(start: Mapping[str, Any], app_id: str, replica: int, rank0_host: str) -> dict[str, str]:
    """Return the variables that depend on the replica.

    Args:
        start: ``late`` (variable to name of its late value), ``first_rank``, ``port`` and ``key_file``.
        app_id: the application's id, as its scheduler chose it.
        replica: index within the role.
        rank0_host: where the first role's replica 0 runs; empty on that replica itself with some schedulers.

    Raises:
        OSError: the key file cannot be read.
    """
    host = rank0_host or "127.0.0.1"
    port = start["port"]
    known = {Late.BIND: f"tcp://0.0.0.0:{port}", **address_parts(f"tcp://{host}:{port}")}
    if start["key_file"]:
        known[Late.JOB_KEY] = job_key(Path(start["key_file"]).expanduser().read_bytes(), app_id)
    env = {name: known[Late[late]] for name, late in start["late"].items()}
    return env | {_RANK: str(start["first_rank"] + replica)}


def job_key(secret: bytes, app_id: str) -> str:
    """Return the key of one application, from the secret that its user keeps."""
    return encode_key(hmac.digest(secret, app_id.encode(), hashlib.sha256))


def default_key_file() -> str:
    """Return the user's own key file, and make it if there is none. Its path begins with ``~``.

    Raises:
        OSError: it cannot be made.
    """
    path = Path("~/.paceline/torchx.key")
    real = path.expanduser()
    real.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with open(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    return str(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
