"""The folder of this user alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.host.user_folder import folder, private


def test_folder_that_cannot_be_made_is_named_with_the_way_out() -> None:
    with pytest.raises(LaunchError, match=r"the folder /proc/paceline cannot be made \(.*\): set XDG_RUNTIME_DIR"):
        private(Path("/proc/paceline"), "XDG_RUNTIME_DIR")


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_runtime_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``su``, which keeps the variable."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(12345)
            os.write(writer, str(folder()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as file:
        found = Path(file.read())
    assert found.name == "paceline-12345"
    shutil.rmtree(found)
