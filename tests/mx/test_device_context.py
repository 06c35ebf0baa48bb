from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paceline.mx.context import Context, as_context, as_contexts, as_in_context, check_available, cpu, gpu, num_gpus
from paceline.mx.gluon.utils import split_and_load


@pytest.mark.parametrize(
    ("given", "context"),
    [
        ("cpu", cpu(0)),
        ("cpu(1)", cpu(1)),
        ("cuda:1", gpu(1)),
        ("gpu(2)", gpu(2)),
        ("cuda", gpu(0)),
        (torch.device("cuda", 3), gpu(3)),
        (torch.device("cpu"), cpu()),
        (cpu(4), cpu(4)),
    ],
)
def test_anything_that_names_a_device_becomes_a_context(given, context):
    assert as_context(given) == context


def test_logical_cpus_are_distinct_but_share_memory():
    assert cpu(0) != cpu(1)
    assert cpu(0).device == cpu(1).device == torch.device("cpu")
    assert len({cpu(0), cpu(1), cpu(0)}) == 2


def test_text_of_a_context_names_it_again():
    assert str(cpu(1)) == "cpu(1)"
    assert as_context(str(gpu(5))) == gpu(5)


@pytest.mark.parametrize("wrong", ["tpu", "cpu(", "cuda:-1", "", "meta"])
def test_unknown_device_is_refused(wrong):
    with pytest.raises(ValueError, match="names no device"):
        as_context(wrong)


@pytest.mark.parametrize("wrong", [0, None, 1.5])
def test_non_device_is_refused(wrong):
    with pytest.raises(TypeError, match="device"):
        as_context(wrong)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="negative"):
        cpu(-1)
    with pytest.raises(TypeError, match="not int"):
        Context("cpu", "0")
    with pytest.raises(ValueError, match="unknown"):
        Context("tpu")


def test_device_lists_are_distinct_and_not_empty():
    assert as_contexts("cpu") == [cpu(0)]
    with pytest.raises(ValueError, match="named 2 times"):
        as_contexts([cpu(0), "cpu"])
    with pytest.raises(ValueError, match="empty"):
        as_contexts([])


def test_missing_gpu_is_named():
    with pytest.raises(ValueError, match=rf"gpu\({num_gpus()}\) does not exist"):
        check_available([gpu(num_gpus())])


class Copies(TorchFunctionMode):
    """Notes of each copy whether the caller waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.wait: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.to, torch.Tensor.copy_):
            self.wait.append(not (kwargs or {}).get("non_blocking"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "load",
    [
        lambda one: as_in_context(one, cpu()),
        lambda one: split_and_load(one, [cpu()]),
        lambda one: split_and_load(one, [cpu(0), cpu(1)]),
    ],
)
def test_copies_to_the_host_are_waited_for(load: Any) -> None:
    with Copies() as copies:
        load(torch.ones(4, 2))
    assert set(copies.wait) == {True}


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason="needs a CUDA device")
def test_tensor_of_a_busy_gpu_is_whole_on_the_host() -> None:
    value = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(200_000_000)  # some 0.1 s of the GPU
    value.fill_(1.0)
    assert as_in_context(value, cpu()).min().item() == 1.0
