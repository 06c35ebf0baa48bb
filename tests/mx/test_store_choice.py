import pytest

from paceline.errors import ConfigError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.inprocess import DeviceStore, LocalStore
from paceline.mx.gluon.store_choice import LOCAL_BOUND, Traits, choose_store, needs_optimizer, update_on_store


class Incapable(KVStoreBase):
    def broadcast(self, key, value, out, priority=0):
        raise AssertionError

    def pushpull(self, key, value, out=None, priority=0):
        raise AssertionError


class Asynchronous(DeviceStore):
    type = "dist_async_device"


def test_single_device_needs_no_store_unless_it_compresses():
    assert choose_store("device", 1, None) is None
    assert choose_store("local", 1, {"type": "2bit"}).type == "local"
    assert choose_store("Device", 2, None).type == "device"
    store = LocalStore()
    assert choose_store(store, 1, None) is store


def test_impossible_stores_are_refused():
    with pytest.raises(TypeError, match="kvstore is int"):
        choose_store(3, 1, None)
    with pytest.raises(ValueError, match="need a kvstore"):
        choose_store(None, 1, {"type": "2bit"})
    with pytest.raises(ValueError, match="drift apart"):
        choose_store(None, 2, None)


@pytest.mark.parametrize(
    ("store", "wanted", "largest", "env", "answer"),
    [
        (None, None, 1, {}, False),
        (None, False, 1, {}, False),
        (LocalStore(), None, 1, {}, True),
        (LocalStore(), None, LOCAL_BOUND + 1, {}, False),
        (LocalStore(), True, LOCAL_BOUND + 1, {}, True),
        (DeviceStore(), None, LOCAL_BOUND + 1, {}, True),
        (DeviceStore(), False, 1, {}, False),
        (DeviceStore(), None, 1, {"MXNET_UPDATE_ON_KVSTORE": "0"}, False),
        (DeviceStore(), None, 1, {"MXNET_UPDATE_ON_KVSTORE": "0", "PACELINE_UPDATE_ON_KVSTORE": "1"}, True),
        (DeviceStore(), True, 1, {"MXNET_UPDATE_ON_KVSTORE": "0"}, True),
        (Incapable(), None, 1, {}, False),
        (Asynchronous(), None, 1, {"MXNET_UPDATE_ON_KVSTORE": "0"}, True),
    ],
)
def test_where_the_optimizer_runs(store, wanted, largest, env, answer):
    assert update_on_store(wanted, store, Traits(largest), env) is answer


@pytest.mark.parametrize(
    ("store", "wanted", "words"),
    [(None, True, "needs a kvstore"), (Incapable(), True, "cannot run"), (Asynchronous(), False, "dist_async_device")],
)
def test_impossible_choices_are_refused(store, wanted, words):
    with pytest.raises(ValueError, match=words):
        update_on_store(wanted, store, Traits(1), {})


def test_unreadable_environment_is_named():
    with pytest.raises(ConfigError, match="MXNET_UPDATE_ON_KVSTORE='maybe'"):
        update_on_store(None, DeviceStore(), Traits(1), {"MXNET_UPDATE_ON_KVSTORE": "maybe"})


def test_only_stores_that_apply_pushes_one_by_one_need_an_optimizer():
    types = ["dist_async", "dist_async_device", "dist_device_ssync", "dist_gsync", "dist_ksync"]
    assert all(needs_optimizer(one) for one in types)
    assert not any(needs_optimizer(one) for one in ["local", "device", "dist_sync", "dist_sync_device", "dist"])
