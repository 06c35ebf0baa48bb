import json
import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.errors import CheckpointError, CheckpointNotFoundError
from paceline.kvstore.checkpoint import tensor_file

TENSORS = {
    "layer/weight": torch.arange(24.0).reshape(4, 6) / 7,
    "layer/bias": torch.tensor([-1.5, 0.0, float("inf")]),
    "steps": torch.tensor(12),
}


def written(path, tensors=TENSORS, **manifest):
    tensor_file.write(path, "test", tensors, manifest)
    return path


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "file")


@pytest.mark.parametrize("dtype", list(tensor_file._DTYPES), ids=str)
def test_every_dtype_is_read_as_written_also_by_safetensors(tmp_path, dtype):
    values = torch.tensor([[0, 1, 2], [3, 4, 1]]).to(dtype)
    tensors = {
        "flags": torch.tensor([True] * 3),
        "whole": values,
        "turned": values.T,
        "one": values[0, 1],
        "none": values[:0],
    }
    found = tensor_file.read(written(tmp_path / "file", tensors), "test")
    foreign = load_file(tmp_path / "file")
    assert list(found.tensors) == list(tensors)
    for name, one in tensors.items():
        for other in (found.tensors[name], foreign[name]):
            assert (other.dtype, other.shape) == (one.dtype, one.shape)
            bits, expected = (each.reshape(-1).contiguous().view(torch.uint8) for each in (other, one))
            assert torch.equal(bits, expected)


def test_tensors_that_share_memory_are_both_written(tmp_path):
    whole = torch.arange(6.0)
    found = tensor_file.read(written(tmp_path / "file", {"a": whole, "b": whole[2:4], "c": whole}), "test").tensors
    assert found["a"].tolist() == found["c"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["b"].tolist() == [2, 3]
    found["a"].zero_()
    assert found["c"].tolist() == [0, 1, 2, 3, 4, 5]


def test_manifest_says_what_the_file_is(tmp_path):
    path = tmp_path / "file"
    digest = tensor_file.write(path, "test", TENSORS, {"step": 3}).digest
    with safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["paceline"])
    assert (manifest["format"], manifest["version"], manifest["kind"], manifest["step"]) == ("paceline", 1, "test", 3)
    assert set(manifest["digests"]) == set(TENSORS)
    assert tensor_file.read(path, "test", with_tensors=False).digest == digest
    assert tensor_file.write(tmp_path / "other", "test", TENSORS, {"step": 4}).digest != digest


@pytest.mark.parametrize("seed", range(4))
def test_every_flipped_bit_is_found_and_its_tensor_named(path, seed):
    good, chance = path.read_bytes(), random.Random(seed)
    start = 8 + int.from_bytes(good[:8], "little")
    # Half of them in the data, which are shorter than the header: the int64 first, then the float32.
    places = [chance.randrange(len(good)) for _ in range(50)] + [chance.randrange(start, len(good)) for _ in range(50)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"damaged") as caught:
            tensor_file.read(path, "test")
        assert str(path) in str(caught.value)
        if place >= start:
            inside = place - start
            name = "steps" if inside < 8 else "layer/weight" if inside < 104 else "layer/bias"
            assert repr(name) in str(caught.value)


def test_a_letter_of_the_header_in_the_other_case_is_found(path):
    good = path.read_bytes()
    for place in range(8, 8 + int.from_bytes(good[:8], "little")):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x20]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            tensor_file.read(path, "test", with_tensors=False)


def test_a_file_of_any_other_length_is_refused(path):
    good = path.read_bytes()
    for length in [*range(0, len(good), 7), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            tensor_file.read(path, "test")
    path.write_bytes(good + b"\0")
    with pytest.raises(CheckpointError, match="damaged"):
        tensor_file.read(path, "test")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among files")
@pytest.mark.timeout(60)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is no regular file"):
        tensor_file.read(tmp_path / "pipe", "test")


def test_other_kinds_versions_and_things_are_refused(path, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="holds test, not model"):
        tensor_file.read(path, "model")
    with pytest.raises(CheckpointNotFoundError, match="there is no file"):
        tensor_file.read(tmp_path / "nothing", "test")
    with pytest.raises(CheckpointError, match="directory"):
        tensor_file.read(tmp_path, "test")
    for name, value, words in (
        (
            "VERSION",
            tensor_file.VERSION + 1,
            "has version 2 of the format; this reads 1 to 1; a newer paceline wrote it",
        ),
        ("VERSION", tensor_file.OLDEST - 1, "has version 0 of the format; this reads 1 to 1; load it with an older"),
        ("VERSION", "1", "format 'paceline' '1', which is none of paceline's"),
        ("FORMAT", "other", "format 'other' 1, which is none of paceline's"),
    ):
        with monkeypatch.context() as change:
            change.setattr(tensor_file, name, value)
            written(path)
        with pytest.raises(CheckpointError, match=words):
            tensor_file.read(path, "test")


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"digests": []}', "[" * 100_000], ids=lambda text: text[:20])
def test_header_without_a_manifest_is_refused_whose_digest_is_right(tmp_path, monkeypatch, manifest):
    with monkeypatch.context() as change:
        change.setattr(tensor_file.json, "dumps", with_manifest(manifest))
        path = written(tmp_path / "file", {})
    with pytest.raises(CheckpointError, match="is not a file of paceline: its header has no manifest"):
        tensor_file.read(path, "test")


def with_manifest(manifest):
    """Return a ``json.dumps`` that writes another manifest into the header."""
    return lambda data, **options: json.JSONEncoder(**options).encode(data) if "__metadata__" in data else manifest


def test_versions_of_earlier_releases_are_read(path, monkeypatch):
    monkeypatch.setattr(tensor_file, "VERSION", tensor_file.VERSION + 1)
    assert tensor_file.read(path, "test").manifest["version"] == tensor_file.VERSION - 1


def test_what_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    for wrong in (torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex128)):
        with pytest.raises(TypeError, match="'wrong'"):
            written(tmp_path / "file", {"wrong": wrong})
    with pytest.raises(TypeError, match="not JSON serializable"):
        written(tmp_path / "file", step=object())
    assert not list(tmp_path.iterdir())
