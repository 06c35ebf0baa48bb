"""Parameter shapes of models, in forward order."""

from __future__ import annotations


def _conv(out: int, inner: int, kernel: int) -> list[tuple[int, ...]]:
    return [(out, inner, kernel, kernel), (out,), (out,)]


def resnet50() -> list[tuple[int, ...]]:
    """The 161 tensors of ResNet-50 (He et al. 2015): 25.56 million elements."""
    shapes = _conv(64, 3, 7)
    inner = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _conv(width, inner, 1) + _conv(width, width, 3) + _conv(width * 4, width, 1)
            if block == 0:
                shapes += _conv(width * 4, inner, 1)
            inner = width * 4
    return [*shapes, (1000, 2048), (1000,)]


def lenet() -> list[tuple[int, ...]]:
    """LeNet as MXNet's examples have it: 431 thousand elements."""
    return [(20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (500, 800), (500,), (10, 500), (10,)]


def bert_base() -> list[tuple[int, ...]]:
    """BERT-base (Devlin et al. 2018): 109 million elements."""
    shapes: list[tuple[int, ...]] = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
    for _ in range(12):
        shapes += [(768, 768), (768,)] * 4 + [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    return [*shapes, (768, 768), (768,)]


def tiny(count: int) -> list[tuple[int, ...]]:
    """``count`` keys of one element."""
    return [(1,)] * count


def evenly(count: int, total: int) -> list[tuple[int, ...]]:
    """``count`` keys that have ``total`` elements together."""
    return [(total // count + (index < total % count),) for index in range(count)]


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Return the shapes behind a name: ``resnet50``, ``lenet``, ``bert-base``, ``tiny-N``, ``split-N``.

    Raises:
        ValueError: unknown name.
    """
    named = {"resnet50": resnet50, "lenet": lenet, "bert-base": bert_base}
    if name in named:
        return named[name]()
    kind, _, count = name.partition("-")
    if kind == "tiny" and count.isdigit():
        return tiny(int(count))
    if kind == "split" and count.isdigit():
        return evenly(int(count), 25_557_032)
    raise ValueError(f"unknown shapes {name!r}; known are {', '.join(named)}, tiny-N and split-N")
