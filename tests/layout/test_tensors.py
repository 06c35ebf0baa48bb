"""Tensors that paceline makes do not depend on the default device and the default dtype of the user's script."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline.layout.tensors import as_tensor, small_to_host

ROOT = Path(paceline.__file__).parent

#: Factories that ask for the default device where they are not told one, and those whose dtype is the default one.
DTYPED = {"empty", "zeros", "ones", "rand", "randn"}
OTHERS = {
    "arange", "as_tensor", "asarray", "empty_permuted", "empty_strided", "eye", "full", "linspace", "normal", "randint",
    "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor",
}  # fmt: skip


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, set[str | None]]]:
    """Yield the calls of torch's factories, each with its name and the names of its arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in DTYPED | OTHERS:
                yield node, name, {one.arg for one in node.keywords}


def test_every_tensor_is_made_on_a_device_and_of_a_dtype_that_its_code_names() -> None:
    found = 0
    for path in ROOT.rglob("*.py"):
        for node, name, given in calls(ast.parse(path.read_text())):
            found += 1
            where = f"{path.relative_to(ROOT)}:{node.lineno}: torch.{name}"
            assert "device" in given, f"{where} takes the default device of the script, which may be a GPU: name one"
            assert name not in DTYPED or "dtype" in given, f"{where} takes the script's default dtype: name one"
    assert found > 50


def test_tensors_stay_where_they_are_and_other_data_come_to_the_host() -> None:
    with torch.device("meta"):
        here = torch.ones(2)
        assert as_tensor(here) is here
        assert as_tensor([1, 2]).tolist() == [1, 2]


def test_tensors_of_the_host_are_not_copied_there() -> None:
    given = {"a": torch.ones(2, 3), "b": torch.tensor(1)}
    assert all(one is given[name] for name, one in small_to_host(given).items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_tensors_of_a_gpu_come_to_the_host_in_their_shapes() -> None:
    small = [torch.rand(3, 4), torch.tensor(7), torch.rand(()), torch.rand(2, 3).t(), torch.zeros(0, 4)]
    given = {str(number): one for number, one in enumerate([*small, torch.rand(600, 700)])}
    found = small_to_host({name: one.cuda() for name, one in given.items()})
    assert [one.device.type for one in found.values()] == ["cpu"] * len(small) + ["cuda"]
    assert all(torch.equal(one.cpu(), given[name]) for name, one in found.items())
