"""Published networks, against the modules of the examples."""

from __future__ import annotations

import pytest
import torch

from examples.models import build
from paceline.sim.models import NETWORKS, arrays, even

#: Parameters and billions of multiplications per image, as published.
PUBLISHED = {
    "alexnet": (61_100_840, 0.71),
    "inception-v3": (23_834_568, 5.7),
    "resnet18": (11_689_512, 1.8),
    "resnet50": (25_557_032, 4.1),
    "resnet152": (60_192_808, 11.5),
    "vgg16": (138_357_544, 15.5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_network_has_its_published_size_and_cost(name: str) -> None:
    numel, billions = PUBLISHED[name]
    assert sum(one.numel for one in arrays(name)) == numel
    assert sum(one.multiplications for one in arrays(name)) == pytest.approx(1e9 * billions, rel=0.02)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_has_the_arrays_of_the_module(name: str) -> None:
    family = name.rstrip("0123456789")
    network, options = {
        "resnet": ("resnet-v1", {"num_layers": int(name[6:] or 0)}) if family == "resnet" else ("", {}),
        "vgg": ("vgg", {"num_layers": int(name[3:] or 0)}) if family == "vgg" else ("", {}),
    }.get(family, (name, {}))
    with torch.device("meta"):
        module = build(network, **options)
    assert [one.numel for one in arrays(name)] == [one.numel() for one in module.parameters()]


def test_unknown_network_is_an_error_that_suggests_one() -> None:
    with pytest.raises(ValueError, match="'resnet51' is unknown; did you mean 'resnet50'"):
        arrays("resnet51")


@pytest.mark.parametrize("numel", [1, 7, 1_000_003])
def test_network_of_a_size_has_that_size(numel: int) -> None:
    assert sum(one.numel for one in even(numel)) == numel
    assert min(one.numel for one in even(numel)) >= 1
