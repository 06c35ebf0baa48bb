import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def networks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("networks", EXAMPLES / "networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [("mlp", (1, 28, 28), 109_386), ("lenet", (1, 28, 28), 431_080), ("resnet18", (3, 32, 32), 11_173_962)],
)
def test_network_has_its_published_size_and_a_score_per_class(
    networks: ModuleType, name: str, shape: tuple[int, ...], parameters: int
) -> None:
    net = networks.NETWORKS[name]()
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet18"])
def test_seed_decides_the_first_weights(networks: ModuleType, name: str) -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(torch.nn.utils.parameters_to_vector(networks.NETWORKS[name]().parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_every_parameter_of_resnet18_learns(networks: ModuleType) -> None:
    net = networks.resnet18(width=8)
    net(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in net.parameters())
