import contextlib
import errno
import fcntl
import os
import resource
import signal
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.kvstore.checkpoint import tensor_file
from paceline.kvstore.checkpoint import whole_file as module
from paceline.kvstore.checkpoint.whole_file import whole_file
from tests.clusters import programs

OLD = b"what was there before"


def put(path, data):
    with whole_file(path) as draft:
        draft.file.write(data)


def names(folder):
    return sorted(one.name for one in folder.iterdir())


@contextlib.contextmanager
def mounted(folder, *options):
    """Have something mounted on a folder; the test is skipped where that is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"mount needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


# ---- whole, or not at all ------------------------------------------------------------------------------------------


def test_the_file_is_replaced_when_the_block_ends(old):
    with whole_file(old) as draft:
        draft.file.write(b"new")
        draft.file.flush()
        assert old.read_bytes() == OLD
    assert old.read_bytes() == b"new"
    assert names(old.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_changes_when_the_block_fails(old, error):
    def fail():
        with whole_file(old) as draft:
            draft.file.write(b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert old.read_bytes() == OLD
    assert names(old.parent) == ["file"]


def test_data_are_on_the_disk_before_the_name_and_the_name_before_the_end(old, monkeypatch):
    done = []
    fsync, replace = os.fsync, Path.replace

    def synced(fd):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else f"{os.fstat(fd).st_size} bytes")
        fsync(fd)

    def replaced(self, target):
        done.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    put(old, b"12345")
    assert done == ["5 bytes", "name", "folder"]


def test_a_symbolic_link_stays_one(old):
    link = old.with_name("link")
    link.symlink_to(old)
    put(link, b"new")
    assert link.is_symlink()
    assert old.read_bytes() == b"new"


def test_what_others_name_like_a_leftover_neither_stops_a_save_nor_is_removed(old):
    """A pipe would be opened and waited for."""
    kept = old.with_name("kept")
    kept.touch()
    names_of = [old.with_name(f"{old.name}.{module._kernel()}-7-0123456{digit}.partial") for digit in "ab"]
    os.mkfifo(names_of[0])
    names_of[1].symlink_to(kept)
    put(old, b"new")
    assert old.read_bytes() == b"new"
    assert all(map(os.path.lexists, [kept, *names_of]))


def test_permissions_are_those_of_any_new_file(tmp_path):
    put(tmp_path / "file", b"new")
    (tmp_path / "plain").write_bytes(b"new")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---- disks ---------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as folder:
        put(folder / "file", OLD)
        with pytest.raises(CheckpointError, match=r"small/file could not be written: No space left .* MB are free"):
            tensor_file.write(folder / "file", "test", {"w": torch.zeros(1_000_000)}, {})
        assert (folder / "file").read_bytes() == OLD
        assert names(folder) == ["file"]


def test_a_file_beyond_the_limit_is_named_and_leaves_the_old_file(old):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"file could not be written: File too large") as caught:
            put(old, bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.__cause__, OSError)
    assert old.read_bytes() == OLD
    assert names(old.parent) == ["file"]


@pytest.mark.root
def test_a_read_only_folder_is_named_and_leaves_the_old_file(tmp_path):
    folder = tmp_path / "fixed"
    folder.mkdir()
    (folder / "file").write_bytes(OLD)
    with mounted(folder, "--bind", "-o", "ro", str(folder)):
        with pytest.raises(CheckpointError, match="fixed/file could not be written: Read-only file system"):
            put(folder / "file", b"new")
        assert (folder / "file").read_bytes() == OLD


def test_a_folder_that_is_missing_or_a_target_that_is_a_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"there is no folder {tmp_path}/none"):
        put(tmp_path / "none" / "file", b"new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        put(tmp_path / "folder", b"new")
    assert names(tmp_path) == ["folder"]


def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe could not be written: it is a pipe, a device or a socket"):
        put(tmp_path / "pipe", b"new")
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL])
def test_a_folder_that_cannot_be_synced_is_a_warning_unless_its_file_system_never_does(old, monkeypatch, caplog, code):
    fsync = os.fsync

    def refused(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refused)
    put(old, b"new")
    assert old.read_bytes() == b"new"
    assert [str(old) in one.getMessage() for one in caplog.records] == ([] if code == errno.EINVAL else [True])


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADF])
def test_whichever_call_fails_the_file_is_what_the_save_says(old, monkeypatch, code):
    calls = {"os.open": os.open, "os.fsync": os.fsync, "os.scandir": os.scandir, "os.unlink": os.unlink}
    calls |= {"os.replace": os.replace, "os.close": os.close, "os.fstat": os.fstat}
    seen, failing = [], 0

    def failing_in_turn(name, call):
        def tried(*args, **options):
            seen.append(name)
            if len(seen) == failing:
                raise OSError(code, os.strerror(code))
            return call(*args, **options)

        return tried

    ended = []
    while failing == 0 or len(seen) >= failing:
        failing, seen = failing + 1, []
        old.write_bytes(OLD)
        with monkeypatch.context() as patch:
            for name, call in calls.items():
                patch.setattr(name, failing_in_turn(name, call))
            try:
                put(old, b"new")
                ended.append(b"new")
            except CheckpointError:  # its text: the old file is unchanged
                ended.append(OLD)
        assert old.read_bytes() == ended[-1]
    assert {OLD, b"new"} == set(ended[:-1])


# ---- several writers, and dead ones --------------------------------------------------------------------------------

_WRITER = """
import sys
from paceline.kvstore.checkpoint.whole_file import whole_file
with whole_file(sys.argv[1]) as draft:
    draft.file.write(b"half of it")
    draft.file.flush()
    print("there", flush=True)
    open(sys.argv[2]).readline()
    draft.file.write(b", and the rest")
"""


@contextlib.contextmanager
def writer(path):
    """A process that has written half of a file, and writes the rest when a line comes from a pipe."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder, "pipe")
        os.mkfifo(pipe)
        read, write = os.pipe()
        with open(read) as output, programs.started(["-c", _WRITER, path, pipe], write, 2) as process:
            os.close(write)
            assert output.readline() == "there\n"
            yield process, pipe


def test_what_a_killed_process_left_goes_with_the_next_save(old):
    with writer(old) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    assert old.read_bytes() == OLD
    [left] = [name for name in names(old.parent) if name != "file"]
    put(old.with_name("file2"), b"another file's save leaves it alone")
    assert left in names(old.parent)
    put(old, b"new")
    assert names(old.parent) == ["file", "file2"]


def test_what_another_process_still_writes_is_left_alone(old):
    with writer(old) as (process, pipe):
        put(old, b"new")
        assert len(names(old.parent)) == 2
        pipe.write_text("go on\n")
        assert process.wait(timeout=30) == 0
    assert old.read_bytes() == b"half of it, and the rest"
    assert names(old.parent) == ["file"]


def test_what_another_kernel_left_goes_after_a_day(old):
    left = old.with_name("file.00000000-17-0123abcd.partial")
    foreign = old.with_name("file.note.partial")
    for one in (left, foreign):
        one.write_bytes(b"half")
    put(old, b"new")
    assert left in old.parent.iterdir()
    then = time.time() - module.STALE_S - 60
    for one in (left, foreign):
        os.utime(one, (then, then))
    put(old, b"newer")
    assert names(old.parent) == ["file", foreign.name]


def test_a_temporary_file_that_was_taken_for_stale_is_made_again(old, monkeypatch):
    flock, made = fcntl.flock, []

    def raced(file, how):
        if not made:
            made.append(file.name)
            for one in old.parent.glob("*.partial"):
                one.unlink()
        return flock(file, how)

    monkeypatch.setattr(fcntl, "flock", raced)
    put(old, b"new")
    assert made
    assert old.read_bytes() == b"new"
    assert names(old.parent) == ["file"]


def test_of_writers_at_the_same_time_one_stays_whole(tmp_path):
    path, failed = tmp_path / "file", []

    def save(number):
        try:
            for round in range(20):
                values = {"w": torch.full((10_000,), float(number))}
                tensor_file.write(path, "test", values, {"writer": number, "round": round})
                found = tensor_file.read(path, "test")
                assert found.tensors["w"].unique().item() == found.manifest["writer"]
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    threads = [threading.Thread(target=save, args=[number]) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failed
    assert tensor_file.read(path, "test").manifest["round"] == 19
    assert names(tmp_path) == ["file"]
