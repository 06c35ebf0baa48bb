"""The stores inside one process: ``local`` and ``device``."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from paceline.errors import KeyMismatchError
from paceline.kvstore.base import KVStore, OptimizerLike, Updater
from paceline.kvstore.checkpoint import optimizer_states as state_files
from paceline.kvstore.device_sums import DeviceSums
from paceline.kvstore.options import (
    Schedule,
    in_force,
    no_optimizer,
    own_class,
    plain_keys,
    refuse_changes,
    schedule_of,
)
from paceline.layout import arguments as check
from paceline.layout.keys import Key, Keys, Values, by_key, check_kind, checked_key, checked_table
from paceline.layout.tensors import check_initialised
from paceline.updaters import (
    KeyedOptimizer,
    KeyOptions,
    Options,
    UpdaterSpec,
    check_numbers,
    check_options,
    check_state,
    make_spec,
)
from paceline.updaters.rows import put_rows, to_rows

if TYPE_CHECKING:
    from paceline.compression import Compression

#: Clips merged values in place, given the factor that turns them into gradients; returns the factor to use instead.
Clip: TypeAlias = Callable[[Sequence[torch.Tensor], float], float]
#: Optimizer state of one key: tensors and plain numbers by name.
State: TypeAlias = dict[str, Any]
OptimizerClass: TypeAlias = type[torch.optim.Optimizer]


class InProcessStore(KVStore):
    """A store whose values are in this process. Not thread-safe.

    Subclasses choose the device on which a key is merged and updated. The store keeps no tensor of a caller. It checks
    all arguments before it changes anything, and the arguments of one call succeed or fail together.

    Args:
        store_type: the type as the user wrote it, in lower case; by default the class's own.

    Attributes:
        scale: factor that turns the pushed sums into gradients (1 / batch size for Gluon's ``Trainer``).
        clip: changes the merged values of a push before they are applied.
    """

    _TYPE = ""

    def __init__(self, store_type: str = "") -> None:
        self.scale = 1.0
        self.clip: Clip | None = None
        self._type = store_type or self._TYPE
        self._claimed = False
        self._compression: Compression | None = None
        self._handed_on: Compression | None = None
        # Without an optimizer values may be row-sparse: the sum of pushed rows.
        self._values: dict[Key, torch.Tensor] = {}
        self._row_sparse: set[Key] = set()
        self._ignored: set[Key] = set()
        self._sums = DeviceSums()
        self._updater: Updater | None = None
        self._optimizers: dict[torch.device, KeyedOptimizer] = {}
        self._spec: UpdaterSpec | None = None
        self._class: OptimizerClass | None = None
        self._groups: Sequence[Options] = ()
        self._keys: Mapping[Key, KeyOptions] | None = None
        self._schedule: Schedule | None = None
        self._loaded: dict[Key, State] = {}
        self._updates = 0

    @property
    def type(self) -> str:
        """The type as given to ``create``, in lower case."""
        return self._type

    @abc.abstractmethod
    def _place(self, values: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        """Choose the devices that merge the keys of a push, and move their stored values there if necessary."""

    def init(self, key: Keys, value: Values) -> None:
        """See :meth:`KVStore.init`. A value may be a list of one."""
        given = by_key(key, value)
        check_kind(given, () if self._claimed else self._values)
        check_initialised((one, devices[0]) for one, devices in given.items())
        for one, devices in given.items():
            if one in self._values or len(devices) > 1:
                raise KeyMismatchError(f"key {one!r} is initialised twice; init every key once, with one value")
        for one, (first,) in given.items():
            dense = first.detach().to_dense() if first.is_sparse else first.detach()
            self._values[one] = self._initial(dense.clone(memory_format=torch.contiguous_format))
            if first.is_sparse:
                self._row_sparse.add(one)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Initialise keys and copy the values into ``out``."""
        values = {one: devices[0] for one, devices in by_key(key, value).items()}
        check_initialised(values.items())
        check.outputs(values, by_key(key, out))
        self.init(key, value)
        self.pull(key, out, priority)

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """See :meth:`KVStore.push`. Here it returns after the update."""
        pushed = by_key(key, value)
        check.pushes(self._values, pushed)
        self._place(pushed)
        merged = {one: self._sums.merge(one, devices, self._values[one].device) for one, devices in pushed.items()}
        if self._spec is None and self._updater is None:
            for one, total in merged.items():
                self._assign(one, total)
        else:
            if self._schedule is not None and self._spec is not None:
                self._groups = self._schedule.groups(list(merged), self._options(self._spec))
            self._update({one: self._added(one, total) for one, total in merged.items()})
        self._updates += 1

    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:
        """See :meth:`KVStore.pull`. Row-sparse ``out`` is not changed unless ``ignore_sparse`` is False."""
        outs = by_key(key, out)
        check.outputs(self._values, outs)
        with torch.no_grad():
            for one, targets in outs.items():
                for target in targets:
                    if not target.is_sparse:
                        target.detach().copy_(self._dense(one), non_blocking=target.is_cuda)
                    elif not ignore_sparse:
                        target.copy_(to_rows(self._values[one]).to(target.device, target.dtype))
                    else:
                        check.note_ignored(one, self._ignored)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull into ``out``, or into ``value`` itself."""
        target = value if out is None else out
        check.outputs(self._values, by_key(key, target))
        self.push(key, value, priority)
        self.pull(key, target, priority, ignore_sparse=False)

    def row_sparse_pull(self, key: Keys, out: Values, priority: int = 0, row_ids: Values | None = None) -> None:
        """See :meth:`KVStore.row_sparse_pull`. Any key with at least two dimensions has rows here."""
        outs = by_key(key, out)
        chosen = check.chosen_rows(self._values, outs, key, row_ids)
        for one, targets in outs.items():
            for target, rows in zip(targets, chosen[one], strict=True):
                value = self._dense(one).detach()
                put_rows(value[rows.to(value.device)], rows, target)

    def set_optimizer(self, optimizer: OptimizerLike, **options: Any) -> None:
        """See :meth:`KVStore.set_optimizer`. Any optimizer class works, also one that cannot be imported.

        Only the class and the options of an optimizer instance are used; the instance makes no steps.
        """
        schedule = schedule_of(options)
        spec = make_spec(optimizer, **plain_keys(options))
        cls = own_class(spec, optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            check_options(cls, spec.groups)
        self._set(None, spec, cls, schedule)

    def set_updater(self, updater: str | Updater, **options: Any) -> None:
        """See :meth:`KVStore.set_updater`."""
        if isinstance(updater, str):
            self.set_optimizer(updater, **options)
        elif callable(updater) and not options:
            self._set(updater)
        else:
            raise TypeError("an updater is a name with options, or a callable updater(key, merged, stored) without")

    def _set(
        self,
        updater: Updater | None,
        spec: UpdaterSpec | None = None,
        cls: OptimizerClass | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._updater, self._spec, self._class, self._schedule = updater, spec, cls, schedule
        self._optimizers, self._loaded = {}, {}
        self._groups, self._keys = (), None

    def set_options(self, groups: Sequence[Options] = (), keys: Mapping[Key, KeyOptions] | None = None) -> None:
        """See :meth:`KVStore.set_options`."""
        refuse_changes(self._need_optimizer("change"), groups)
        check_numbers(groups, keys)
        self._groups = list(groups) or self._groups
        self._keys = self._keys if keys is None else checked_table(keys)

    def options(self) -> list[Options]:
        """See :meth:`KVStore.options`."""
        spec = self._need_optimizer("read")
        return in_force(self._options(spec), self._class)

    def for_optimizer(self, mean: bool | None = None, clip_norm: float = 0.0) -> InProcessStore:
        """See :meth:`KVStore.for_optimizer`. With one worker mean and sum are the same.

        Raises:
            ValueError: a largest norm: gradients are clipped before the push.
        """
        if clip_norm:
            raise ValueError(f"a {self._type} store has no merged gradient to clip; clip in the worker")
        if not (self._claimed or self._values or self._spec or self._updater):
            self._claimed, self._handed_on = True, self._compression
            return self
        other = type(self)(self._type)
        other._claimed = True
        settings = self._handed_on if self._claimed else self._compression
        if settings is not None:
            other.set_gradient_compression(settings)
        return other

    def assign(self, key: Key, value: torch.Tensor) -> None:
        """Set a stored value from outside; the optimizer's state is not changed.

        Raises:
            KeyMismatchError: unknown key.
            ValueError: wrong shape.
        """
        key = checked_key(key)
        check.outputs(self._values, {key: [value]})
        self._dense(key).copy_(value.detach())
        if (optimizer := self._optimizer_of(key)) is not None:
            optimizer.value_was_set(key)

    def set_gradient_compression(self, compression_params: Compression) -> None:
        """See :meth:`KVStore.set_gradient_compression`. Row-sparse and integer values are not compressed.

        Each device's push is encoded and decoded before it is summed. No data is sent here, so there is no pull leg.

        Raises:
            ValueError: unknown type or parameters, the pull leg, or values were pushed already.
        """
        if self._updates:
            raise ValueError("gradient compression must be set before the first push")
        self._sums.set_codec(compression_params)
        self._compression = compression_params

    @property
    def keeps_residuals(self) -> bool:
        """See :attr:`KVStore.keeps_residuals`."""
        return self._sums.keeps_residuals

    def codec_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """See :meth:`KVStore.codec_states`: per device of a key."""
        return self._sums.codec_states()

    def set_codec_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """See :meth:`KVStore.set_codec_states`. Keys may be initialised later."""
        states = checked_table(states)
        for key, tensors in states.items():
            for name, tensor in tensors.items():
                if name.startswith("residual") and key in self._values and tensor.numel() != self._values[key].numel():
                    raise ValueError(
                        f"{name} of key {key!r} has {tensor.numel()} elements: it belongs to another model"
                    )
        self._sums.set_codec_states(states)

    def optimizer_states(self) -> dict[Key, State]:
        """See :meth:`KVStore.optimizer_states`. Plain numbers of an optimizer are returned as numbers."""
        self._need_optimizer("read")
        return {key: self._state(key) for key in self._values}

    def set_optimizer_states(self, states: Mapping[Key, Mapping[str, Any]]) -> None:
        """See :meth:`KVStore.set_optimizer_states`. Keys may be initialised later.

        Raises:
            ValueError: the states are of keys with other shapes. Then no state is changed.
        """
        given = {key: dict(state) for key, state in checked_table(states).items()}
        self._check_states(given)
        for key, state in given.items():
            optimizer = self._optimizer_of(key)
            if optimizer is None:
                self._loaded[key] = state
            else:
                optimizer.load_state(key, state)

    def _check_states(self, states: Mapping[Key, State]) -> None:
        spec = self._need_optimizer("set")
        for key in states.keys() & self._values.keys():
            check_state(key, self._values[key], states[key], spec)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """See :meth:`KVStore.save_optimizer_states`."""
        spec = self._need_optimizer("save")
        groups = self._options(spec) if dump_optimizer else None
        state_files.save(self, fname, self.optimizer_states, optimizer=spec.name, groups=groups)

    def load_optimizer_states(self, fname: str) -> None:
        """See :meth:`KVStore.load_optimizer_states`. Keys may be initialised later.

        Raises:
            ValueError: the states are of another optimizer, or of keys with other shapes. Then no state changes.
        """
        spec = self._need_optimizer("load")
        loaded = state_files.load(self, fname, True, spec.name)
        assert loaded.states is not None, "this process is worker 0"
        groups = loaded.options(len(self._options(spec)))
        self._check_states(loaded.states)
        state_files.set_residuals(self, loaded.own)
        self._loaded = {}
        anew: dict[Key, State] = {key: {} for key in self._values}
        self.set_optimizer_states(anew | loaded.states)
        self._groups = groups or self._groups

    def _options(self, spec: UpdaterSpec) -> Sequence[Options]:
        """Return the options per param group that were given."""
        return self._groups or spec.groups

    def stats(self) -> dict[str, Any]:
        """Return the number of pushes that were applied."""
        return {"updates": self._updates}

    def close(self) -> None:
        """Release all values, states and buffers."""
        self._values, self._optimizers, self._loaded, self._sums = {}, {}, {}, DeviceSums()
        self._row_sparse = set()

    def _initial(self, value: torch.Tensor) -> torch.Tensor:
        """Return an initial value on the device where the store keeps it."""
        return value

    def _assign(self, key: Key, merged: torch.Tensor) -> None:
        """Store the merged value, without a copy if possible."""
        if merged.is_sparse:
            self._values[key] = merged
        else:
            self._values[key] = self._sums.exchange(key, self._values[key])

    def _dense(self, key: Key) -> torch.Tensor:
        """Return a stored value, after making it dense."""
        if self._values[key].is_sparse:
            self._values[key] = self._values[key].to_dense()
        return self._values[key]

    def _added(self, key: Key, merged: torch.Tensor) -> torch.Tensor:
        """Return a merged value in its key's form: as rows only if the key was initialised with rows."""
        return merged.to_dense() if merged.is_sparse and key not in self._row_sparse else merged

    def _update(self, merged: Mapping[Key, torch.Tensor]) -> None:
        """Run the optimizer or the updater on merged pushes."""
        scale = self.scale if self.clip is None else self.clip(list(merged.values()), self.scale)
        if self._updater is not None:
            for key, total in merged.items():
                self._updater(key, total if scale == 1.0 else total.mul_(scale), self._dense(key))
            return
        by_device: dict[KeyedOptimizer, dict[Key, torch.Tensor]] = {}
        for key, total in merged.items():
            by_device.setdefault(self._ready_optimizer(key), {})[key] = total
        for optimizer, totals in by_device.items():
            optimizer.set_options(self._groups, self._keys)
            optimizer.update(totals, scale)

    def _optimizer_of(self, key: Key) -> KeyedOptimizer | None:
        """Return the optimizer that has a key, or None: it gets a key with its first update."""
        found = self._optimizers.get(self._values[key].device) if key in self._values else None
        return found if found is not None and key in found.keys else None

    def _ready_optimizer(self, key: Key) -> KeyedOptimizer:
        """Return the optimizer of a key; a new key is added to it."""
        value = self._dense(key)
        assert self._spec is not None
        assert self._class is not None
        if not (value.is_floating_point() or value.is_complex()):
            raise TypeError(f"key {key!r} is {value.dtype}: an optimizer or updater by name changes floats only")
        if value.device not in self._optimizers:
            self._optimizers[value.device] = KeyedOptimizer(self._spec, self._class)
        optimizer = self._optimizers[value.device]
        if key not in optimizer.keys:
            optimizer.add(key, value)
            if key in self._loaded:
                optimizer.load_state(key, self._loaded.pop(key))
        return optimizer

    def _state(self, key: Key) -> State:
        optimizer = self._optimizer_of(key)
        return self._loaded.get(key, {}) if optimizer is None else optimizer.state(key)

    def _need_optimizer(self, verb: str) -> UpdaterSpec:
        if self._spec is None:
            raise no_optimizer(self.type, verb)
        return self._spec


class LocalStore(InProcessStore):
    """Copies all gradients to CPU memory, sums them there and updates the weights there (MXNet's ``local``)."""

    _TYPE = "local"

    def _initial(self, value: torch.Tensor) -> torch.Tensor:
        return value.cpu()

    def _place(self, values: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        """Do nothing: all values are in CPU memory."""


class DeviceStore(InProcessStore):
    """Sums gradients on the devices, by NCCL among distinct GPUs, and updates the weights there (MXNet's ``device``).

    Every key is merged on one of the devices that push it. Keys are assigned by size, the largest first, each to the
    device with the smallest load. This spreads merging and updating over the devices.
    """

    _TYPE = "device"

    def __init__(self, store_type: str = "") -> None:
        super().__init__(store_type)
        self._key_devices: dict[Key, torch.device] = {}
        """The device that merges and updates each key that was pushed so far."""
        self._load: dict[torch.device, int] = {}

    def close(self) -> None:
        """Release all values, states, buffers and placements."""
        super().close()
        self._key_devices, self._load = {}, {}

    def _place(self, values: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        new = [key for key in values if key not in self._key_devices]
        for key in sorted(new, key=lambda one: -self._values[one].nbytes):
            devices = dict.fromkeys(one.device for one in values[key])
            device = min(devices, key=lambda device: self._load.get(device, 0))
            self._key_devices[key], self._values[key] = device, self._values[key].to(device)
            self._load[device] = self._load.get(device, 0) + self._values[key].nbytes
