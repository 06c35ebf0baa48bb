"""Folders of this user alone; one is for what processes of running jobs share: in memory where the system has that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.errors import LaunchError


def folder() -> Path:
    """Return the user's runtime folder, made if need be.

    Raises:
        LaunchError: it cannot be made, belongs to somebody else, or others may write there.
    """
    return private(_path(os.environ.get("XDG_RUNTIME_DIR", "")), "XDG_RUNTIME_DIR")


def private(path: Path, way_out: str) -> Path:
    """Return a folder that only this user can read and write, made if need be; the variable ``way_out`` moves it.

    Raises:
        LaunchError: it cannot be made, belongs to somebody else, or others may write there.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:  # a link that leads nowhere, too
        pass
    except OSError as error:
        raise LaunchError(f"the folder {path} cannot be made ({error.strerror}): set {way_out}") from error
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        is_own = found.st_uid == os.geteuid()
        way = "remove it" if is_own else f"it is user {found.st_uid}'s, who or root can remove it"
        raise LaunchError(f"{path} is not a folder that only you can use; {way}, or set {way_out}")
    return path


def _path(above: str) -> Path:
    if above and os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK):  # after su it is another user's
        return Path(above, "paceline")
    shared = Path("/dev/shm")
    return (shared if os.access(shared, os.W_OK | os.X_OK) else Path("/tmp")) / f"paceline-{os.geteuid()}"
