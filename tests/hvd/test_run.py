"""``hvd.run`` runs a function on several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.hvd as hvd
from paceline.errors import LaunchError, MissingExtraError


def test_results_by_rank_and_failures(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    base = 10

    def work(offset: int, scale: float = 1.0) -> list[float]:
        hvd.init()
        print("ready")
        return [hvd.rank(), hvd.allreduce(torch.tensor([scale * offset * hvd.rank()]), op=hvd.Sum).item() + base]

    options: dict[str, Any] = {"hosts": "localhost:2", "use_gloo": True, "use_mpi": False, "start_timeout": 90}
    options |= {"output_filename": str(tmp_path / "out"), "ssh_port": 22, "disable_cache": True, "slots": None}
    options |= {"executable": sys.executable, "network_interfaces": "lo", "verbose": 0}
    assert hvd.run(work, (2,), {"scale": 3.0}, num_proc=2, **options) == [[0, 16.0], [1, 16.0]]
    assert (
        "".join(sorted(one.read_text() for one in (tmp_path / "out").rglob("*") if one.is_file())).count("ready") == 2
    )

    def fail() -> None:
        os._exit(3)

    with pytest.raises(LaunchError, match="exited with non-zero status"):
        hvd.run(fail, np=1)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.run(work, num_proc=0)


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"hosts": "localhost:1,node7:1"}, "node7 is another host.* paceline launch -n 2 -s 0 -H localhost,node7"),
        ({"hosts": "localhost:1"}, "num_proc is 2, and the hosts have 1 slots"),
        ({"hosts": "localhost:two"}, "is not host:slots"),
        ({"hosts": ""}, "is not host:slots"),
        ({"hosts": "localhost:2", "hostfile": "h"}, "both given"),
        ({"use_mpi": True}, "use_mpi is set.* mpirun -np 2 python train.py"),
        ({"mpi_args": "-x"}, "mpi_args is set"),
        ({"use_gloo": True, "use_mpi": True}, "leave out use_mpi"),
        ({"min_num_proc": 1}, "min_num_proc is for elastic jobs.* --max-restarts"),
    ],
)
def test_arguments_of_horovod_that_cannot_be_followed_name_a_way_out(options: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValueError, match=way_out):
        hvd.run(print, num_proc=2, **options)


def test_hostfiles_name_this_host_only(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1  # here\n\nnode7 slots=4\n")
    with pytest.raises(ValueError, match="node7 is another host"):
        hvd.run(print, num_proc=2, hostfile=str(tmp_path / "hosts"))
    with pytest.raises(TypeError, match="no argument 'hots'"):
        hvd.run(print, num_proc=2, hots="localhost")


def test_function_of_the_main_script_needs_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        pass

    work.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingExtraError, match=r"cannot import 'work' from the main script: move it to a module"):
        hvd.run(work, num_proc=2)
