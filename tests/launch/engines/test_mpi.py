"""The launcher mpi, without mpirun. tests/engines has Open MPI and MPICH."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch import Host
from paceline.launch.engines.mpi import implementation, mpirun_command


def test_kind_of_mpi_is_read_from_its_version(tmp_path: Path) -> None:
    for kind, text in (("openmpi", "mpirun (Open MPI) 4.1.4"), ("mpich", "HYDRA build details:"), ("", "SGI MPT")):
        mpirun = tmp_path / "mpirun"
        mpirun.write_text(f"#!/bin/sh\necho '{text}'\n")
        mpirun.chmod(0o755)
        if kind:
            assert implementation([str(mpirun)]) == kind
        else:
            with pytest.raises(LaunchError, match="says 'SGI MPT', which is neither Open MPI nor MPICH"):
                implementation([str(mpirun)])


def test_missing_mpirun_is_explained() -> None:
    with pytest.raises(LaunchError, match="'no-mpirun' is not on the PATH of this machine; install the package"):
        implementation(["no-mpirun"])


def test_host_of_this_machine_needs_no_remote_shell() -> None:
    assert mpirun_command(["mpirun"], "mpich", Host("localhost")) == ["mpirun", "-n", "1"]
    assert mpirun_command(["mpirun"], "mpich", Host("h1")) == ["mpirun", "-n", "1", "-hosts", "h1"]
