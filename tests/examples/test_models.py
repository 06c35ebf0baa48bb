import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def models() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import models

        yield models
        for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
            del sys.modules[name]


def parameters_of(net: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


#: Published numbers of parameters: of the papers, torchvision's documentation, and Cadene's models for Inception-BN.
PUBLISHED = [
    ("mlp", {}, 109_386),
    ("lenet", {}, 431_080),
    ("resnet18", {}, 11_173_962),
    ("resnet-v1", {"num_layers": 18}, 11_689_512),
    ("resnet-v1", {"num_layers": 34}, 21_797_672),
    ("resnet-v1", {"num_layers": 50}, 25_557_032),
    ("resnet-v1", {"num_layers": 101}, 44_549_160),
    ("resnet-v1", {"num_layers": 152}, 60_192_808),
    ("vgg", {"num_layers": 16}, 138_357_544),
    ("vgg", {"num_layers": 19}, 143_667_240),
    ("alexnet", {}, 61_100_840),
    ("inception-bn", {}, 11_295_240),
    ("inception-v3", {}, 23_834_568),
]


@pytest.mark.parametrize(("name", "options", "parameters"), PUBLISHED)
def test_network_has_its_published_size(
    models: ModuleType, name: str, options: dict[str, int], parameters: int
) -> None:
    with torch.device("meta"):
        assert parameters_of(models.build(name, **options)) == parameters


#: In the papers' tables, in millions with two or one digits after the point.
ROUNDED = [(20, 0.27, 2), (32, 0.46, 2), (44, 0.66, 2), (56, 0.85, 2), (110, 1.7, 1), (164, 1.7, 1)]


@pytest.mark.parametrize(("layers", "millions", "digits"), ROUNDED)
def test_resnet_for_cifar_has_its_published_size(models: ModuleType, layers: int, millions: float, digits: int) -> None:
    with torch.device("meta"):
        net = models.build("resnet", num_layers=layers, num_classes=10, image_size=32)
    assert round(parameters_of(net) / 1e6, digits) == millions


@pytest.mark.parametrize(
    ("layers", "parameters"),
    [(18, 11_695_796), (34, 21_811_380), (50, 25_595_060), (101, 44_639_412), (152, 60_329_140)],
)
def test_resnet_v2_has_gluons_size(models: ModuleType, layers: int, parameters: int) -> None:
    # Gluon's table counts running means and variances, and scale and shift of the first normalisation, which are fixed.
    with torch.device("meta"):
        net = models.build("resnet", num_layers=layers)
    statistics = sum(buffer.numel() for name, buffer in net.named_buffers() if not name.endswith("tracked"))
    assert parameters_of(net) + statistics + 6 == parameters


def test_merge_and_run_has_its_published_size(models: ModuleType) -> None:
    with torch.device("meta"):
        assert round(parameters_of(models.build("dfn-mr", num_classes=10)) / 1e6, 1) == 1.7


SMALL = [
    ("mlp", {}, (1, 28, 28)),
    ("lenet", {}, (1, 28, 28)),
    ("3conv", {}, (3, 28, 28)),
    ("3conv", {"image_size": 32}, (3, 32, 32)),
    ("resnet18", {}, (3, 32, 32)),
    ("resnet", {"num_layers": 20, "image_size": 32}, (3, 32, 32)),
    ("dfn-mr", {"num_layers": 8}, (3, 32, 32)),
    ("inception-bn-28-small", {}, (3, 28, 28)),
]
LARGE = [
    ("resnet", 224),
    ("resnet-v1", 224),
    ("alexnet", 224),
    ("vgg", 224),
    ("inception-bn", 224),
    ("inception-v3", 299),
]


@pytest.mark.parametrize(("name", "options", "shape"), SMALL)
def test_every_parameter_of_a_small_network_learns(
    models: ModuleType, name: str, options: dict[str, int], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    net = models.build(name, num_classes=10, **options)
    outputs = net(torch.randn(4, *shape))
    assert outputs.shape == (4, 10)
    outputs.square().sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize(("name", "size"), LARGE)
def test_a_large_network_has_a_score_per_class(models: ModuleType, name: str, size: int) -> None:
    with torch.device("meta"):
        assert models.build(name, num_classes=7)(torch.empty(2, 3, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_seed_decides_the_first_weights(models: ModuleType, name: str) -> None:
    options = {"num_layers": 20, "image_size": 32} if name == "resnet" else {}
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(torch.nn.utils.parameters_to_vector(models.build(name, **options).parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("resnet51", {}, "there is no network 'resnet51'"),
        ("alexnet", {"num_layers": 8}, "has no option num_layers"),
        ("resnet", {"num_layers": 51}, "num_layers is 51"),
        ("resnet", {"num_layers": 21, "image_size": 32}, "num_layers is 21"),
        ("vgg", {"num_layers": 12}, "num_layers is 12"),
        ("dfn-mr", {"num_layers": 9}, "num_layers is 9"),
    ],
)
def test_what_does_not_exist_is_refused(models: ModuleType, name: str, options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        models.build(name, **options)
