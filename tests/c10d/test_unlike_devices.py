"""Ranks whose devices have unlike types train one model, with equal weights.

The other type of device is built from ``other_device/memory.cpp``, which takes about 7 s of a core.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import backend_registration

from paceline.testing import LocalJob
from tests.c10d.test_backend import open_group

_TORCH = Path(torch.__file__).parent


def other_device(library: str) -> torch.device:
    """Register the device type, with PyTorch's stand-ins for what its library does not have."""
    torch.utils.rename_privateuse1_backend("other")
    torch.ops.load_library(library)
    torch._register_device_module("other", backend_registration._DummyBackendModule())
    torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    return torch.device("other:0")


def trained(device: torch.device, group: Any, **options: Any) -> list[list[float]]:
    """Train with DDP on a device; returns weights and running means."""
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model = DistributedDataParallel(net.to(device), process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return [one.detach().cpu().flatten().tolist() for one in model.parameters()]


def train(library: str) -> dict[str, Any]:
    open_group()
    device = other_device(library) if dist.get_rank() else torch.device("cpu")
    total = torch.full((3,), 1.0 + dist.get_rank(), device=device)
    dist.all_reduce(total)
    parts = [torch.zeros(2, device=device) for _ in range(2)]
    dist.all_gather(parts, torch.ones(2, device=device))
    return {
        "device": total.device.type,
        "sums": [total.tolist(), *[one.tolist() for one in parts]],
        "unlike": trained(device, None),
        "views": trained(device, None, gradient_as_bucket_view=True, bucket_cap_mb=0.0005),
        "alike": trained(torch.device("cpu"), None),
    }


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build a device type with")
    found = tmp_path_factory.mktemp("device") / "memory.so"
    source = Path(__file__).parent / "other_device" / "memory.cpp"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{_TORCH}/include", str(source), f"-L{_TORCH}/lib",
               "-lc10", "-ltorch_cpu", "-o", str(found)]  # fmt: skip
    subprocess.run(command, check=True, timeout=170)
    return found


def test_ranks_on_unlike_devices_train_as_on_devices_of_one_type(library: Path) -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        first, second = job.run(train, str(library))
    assert [first.pop("device"), second.pop("device")] == ["cpu", "other"]
    assert first == second
    assert first["sums"] == [[3.0] * 3, [1.0] * 2, [1.0] * 2]
    assert first["unlike"] == first["views"] == first["alike"]
