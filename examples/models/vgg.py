"""VGG (Simonyan and Zisserman 2014)."""

from __future__ import annotations

from torch import nn

#: Layers -> convolutions per stage.
_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(num_classes: int = 1000, num_layers: int = 16) -> nn.Sequential:
    """VGG for images [N, 3, 224, 224]; of 16 layers: 138,357,544 parameters.

    Raises:
        ValueError: there is no VGG of this depth.
    """
    if num_layers not in _STAGES:
        raise ValueError(f"there are VGGs of {', '.join(map(str, _STAGES))} layers; num_layers is {num_layers}")
    layers: list[nn.Module] = []
    channels = 3
    for count, width in zip(_STAGES[num_layers], (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(),
        nn.Linear(25088, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, num_classes),
    )  # fmt: skip
