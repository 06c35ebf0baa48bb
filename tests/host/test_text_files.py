"""Files that have all of a text, or what they had before."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from paceline.host.text_files import write_text


def test_file_is_replaced_also_behind_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("one", "two"):
        write_text(link, text)
        assert file.read_text() == text
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_mode_is_that_of_a_new_file(tmp_path: Path) -> None:
    write_text(tmp_path / "secret", "key", 0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_device_is_written_to() -> None:
    write_text("/dev/null", "text")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError, match="No space left") as caught:
        write_text("/dev/full", "text")
    assert caught.value.errno == errno.ENOSPC


def test_file_that_cannot_be_written_is_as_it_was(tmp_path: Path) -> None:
    """A limit of the size of files stands in for a full disk."""
    file, before = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    file.write_text("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        for path in (file, tmp_path / "other"):
            with pytest.raises(OSError, match="File too large"):
                write_text(path, 20 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["before"]
