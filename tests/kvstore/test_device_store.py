import pytest
import torch

from paceline.kvstore.inprocess import DeviceStore, LocalStore
from paceline.mx.context import num_gpus

META = torch.device("meta")


def test_types_and_defaults():
    assert (LocalStore().type, DeviceStore().type) == ("local", "device")
    store = DeviceStore()
    assert (store.rank, store.num_workers, store.is_capable("optimizer")) == (0, 1, True)


def test_keys_are_spread_over_devices_largest_first():
    """The meta device stands for a second memory: placement needs no arithmetic."""
    store = DeviceStore()
    sizes = {"a": 8, "b": 7, "c": 6, "d": 1}
    store.init(list(sizes), [torch.zeros(size) for size in sizes.values()])
    store._place({key: [torch.zeros(size), torch.zeros(size, device=META)] for key, size in sizes.items()})
    key_devices = store._key_devices
    assert {key for key, device in key_devices.items() if device == META} == {"b", "c"}
    assert {key for key, device in key_devices.items() if device.type == "cpu"} == {"a", "d"}


def test_a_key_keeps_its_device():
    store = DeviceStore()
    store.init("a", torch.zeros(2))
    store.push("a", torch.ones(2))
    store._place({"a": [torch.zeros(2, device=META)]})
    assert store._key_devices["a"].type == "cpu"


def test_close_forgets_everything():
    store = DeviceStore()
    store.init("a", torch.zeros(2))
    store.push("a", torch.ones(2))
    store.close()
    store.close()
    assert store._key_devices == {}
    store.init("a", torch.zeros(2))


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("cls", [LocalStore, DeviceStore])
def test_gradients_of_gpu_and_cpu_are_summed(cls):
    store = cls()
    store.set_optimizer("sgd", lr=1.0)
    store.init("w", torch.zeros(5))
    outs = [torch.zeros(5, device="cuda:0"), torch.zeros(5)]
    store.pushpull("w", [torch.ones(5, device="cuda:0"), torch.ones(5)], out=outs)
    assert [one.tolist() for one in outs] == [[-2.0] * 5] * 2


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason="needs a CUDA device")
def test_pulled_value_of_a_busy_gpu_is_whole_in_page_locked_memory():
    store = DeviceStore()
    store.init("w", torch.zeros(1 << 20))
    store.push("w", torch.zeros(1 << 20, device="cuda:0"))
    torch.cuda._sleep(200_000_000)  # some 0.1 s of the GPU
    store.push("w", torch.ones(1 << 20, device="cuda:0"))
    out = torch.zeros(1 << 20).pin_memory()
    store.pull("w", out)
    assert out.min().item() == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 2, reason="needs two CUDA devices")
def test_gradients_of_distinct_gpus_are_summed_there():
    store = DeviceStore()
    store.init(["v", "w"], [torch.zeros(5), torch.zeros(5)])
    values = [[torch.ones(5, device=f"cuda:{i}") for i in range(2)] for _ in "vw"]
    store.pushpull(["v", "w"], values)
    assert {device.index for device in store._key_devices.values()} == {0, 1}
    assert all(one.tolist() == [2.0] * 5 for pair in values for one in pair)
