"""The interface of every key-value store, and the registry of store types."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch

if TYPE_CHECKING:
    from paceline.compression import Compression

Key: TypeAlias = int | str
Keys: TypeAlias = Key | Sequence[Key]
#: One tensor, a list of device values of one key, or one of these per key.
Values: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]
#: A registered name, an instance or a class.
OptimizerLike: TypeAlias = str | torch.optim.Optimizer | type[torch.optim.Optimizer]
Updater: TypeAlias = Callable[[Key, torch.Tensor, torch.Tensor], None]

StoreClass = TypeVar("StoreClass", bound="type[KVStoreBase]")


class KVStoreBase(abc.ABC):
    """A store of named tensors that devices and workers push to and pull from.

    A third-party store needs ``broadcast`` and ``pushpull`` (and ``is_capable``, ``type``, ``rank``,
    ``num_workers``, which have defaults) and works with ``Trainer`` and ``Module``. Register it with
    :meth:`register` and create it by its class name in lower case.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"
    registry: ClassVar[dict[str, type[KVStoreBase]]] = {}

    @staticmethod
    def register(store: StoreClass) -> StoreClass:
        """Make a store class available to ``kvstore.create`` under its lower-cased name (a class decorator).

        Raises:
            ValueError: the name is taken by another class.
        """
        name = store.__name__.lower()
        known = KVStoreBase.registry.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (store.__module__, store.__qualname__):
            raise ValueError(
                f"a store named {name!r} is registered already, by {known.__module__}.{known.__qualname__}"
            )
        KVStoreBase.registry[name] = store
        return store

    @abc.abstractmethod
    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Initialise keys with rank 0's values and copy them into ``out``."""

    @abc.abstractmethod
    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push ``value`` and pull the result into ``out`` (into ``value`` itself when ``out`` is None)."""

    def is_capable(self, capability: str) -> bool:
        """Tell whether the store has a capability; the only one is ``optimizer`` (it can run the optimizer).

        Raises:
            ValueError: unknown capability.
        """
        if capability.lower() != self.OPTIMIZER:
            raise ValueError(f"unknown capability {capability!r}; the only one is {self.OPTIMIZER!r}")
        return False

    @property
    def type(self) -> str:
        """The store's type, as given to ``create`` in lower case."""
        return type(self).__name__.lower()

    @property
    def rank(self) -> int:
        """This worker's rank, 0 to ``num_workers - 1``."""
        return 0

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return 1

    def close(self) -> None:  # noqa: B027 - a store that holds nothing has nothing to do
        """Release what the store holds. Idempotent."""


class KVStore(KVStoreBase):
    """The whole interface of paceline's own stores.

    ``push`` **sums** what the devices and workers push; with an optimizer or updater the sum is its gradient, without
    one the sum replaces the stored value. Keys are int or str (one kind in a store), values are tensors, lists of
    tensors (one per key), or lists of lists (device values of each key). The caller's tensors are never kept.
    """

    @abc.abstractmethod
    def init(self, key: Keys, value: Values) -> None:
        """Initialise keys, once each, with rank 0's values.

        Raises:
            KeyMismatchError: a key is initialised already, or its shape or dtype differs between workers.
        """

    @abc.abstractmethod
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values; device values of one key are summed. Returns before the update is applied."""

    @abc.abstractmethod
    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values into ``out``, after this worker's own pushes of those keys are applied."""

    @abc.abstractmethod
    def set_optimizer(self, optimizer: OptimizerLike, **options: Any) -> None:
        """Run an optimizer where the values are stored.

        Args:
            optimizer: a registered name, a class or an instance.
            **options: options of the class, and of :func:`paceline.updaters.make_spec`: ``keys``, ``multi_precision``,
                ``momentum_form``. As in MXNet also ``rescale_grad`` (a factor on the merged gradient),
                ``clip_gradient`` (the largest absolute value of its elements after that, before weight decay), and
                ``lr_scheduler``: a function ``num_update -> rate`` that sets the rate of every push, where
                ``num_update`` counts this worker's pushes of the key that it has pushed most often, from 1 on
                (``begin_num_update`` is added).

        Raises:
            ValueError: unknown name, or options that the optimizer refuses.
            TypeError: not an optimizer, options it does not have, or a scheduler of torch.
        """

    @abc.abstractmethod
    def set_updater(self, updater: str | Updater, **options: Any) -> None:
        """Set what a push does to the stored value: a registered name (``assign``, ``add``, ``test``) or a callable
        ``updater(key, merged, stored)`` that works in place (callables only where the store is in this process).
        """

    @abc.abstractmethod
    def set_gradient_compression(self, compression_params: Compression) -> None:
        """Compress pushes: ``{"type": "2bit", "threshold": 0.5}``. Before the first push.

        Distributed stores also compress pulls: ``{"type": "int8", "leg": "pull"}``, or ``both``.
        """

    @property
    def keeps_residuals(self) -> bool:
        """Whether the codec of pushes adds what it did not send to the next push."""
        return False

    def codec_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return what this worker's codec remembers of its pushes, by key: residuals, and what it needs besides."""
        return {}

    def set_codec_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """Set what :meth:`codec_states` returned; keys that are not in it start afresh.

        Raises:
            ValueError: states of another codec or model.
        """
        if states:
            raise ValueError(f"a {self.type} store keeps no residuals")

    @abc.abstractmethod
    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state (safetensors with a manifest), and each worker's residuals with it."""

    @abc.abstractmethod
    def load_optimizer_states(self, fname: str) -> None:
        """Read what ``save_optimizer_states`` wrote, with any number of servers."""

    @abc.abstractmethod
    def row_sparse_pull(self, key: Keys, out: Values, priority: int = 0, row_ids: Values | None = None) -> None:
        """Pull only the rows ``row_ids`` of row-sparse keys."""

    def is_capable(self, capability: str) -> bool:
        """Tell whether the store has a capability; all of paceline's own can run the optimizer."""
        super().is_capable(capability)
        return True

    def barrier(self) -> None:
        """Wait until all workers have come here."""

    def num_dead_nodes(self) -> int:
        """How many members of the job are known to be dead."""
        return 0

    def send_command_to_servers(self, head: str, body: str = "") -> list[str]:
        """Run a registered server command on every server and return the answers in server order."""
        raise ValueError(f"a {self.type} store has no servers to send {head!r} to")

    def stats(self) -> dict[str, Any]:
        """Counters of the consistency rule: updates, staleness histogram, step mass, data mass per worker."""
        return {}


def normalise(key: Keys, values: Values) -> tuple[list[Key], list[list[torch.Tensor]]]:
    """Bring any accepted form of (keys, values) to a list of keys and a list of device values per key.

    A key that occurs more than once gets its values joined, in order of first occurrence.

    Raises:
        TypeError: a key is not int or str, kinds are mixed, or a value is not a tensor.
        ValueError: numbers of keys and values differ, or a key has no values.
    """
    if isinstance(key, int | str):
        return [_checked_key(key)], [_device_values(key, values)]
    keys = [_checked_key(one) for one in key]
    if len({type(one) for one in keys}) > 1:
        raise TypeError("the keys of one store are all int or all str, not both")
    if isinstance(values, torch.Tensor) or len(values) != len(keys):
        count = "one tensor" if isinstance(values, torch.Tensor) else f"{len(values)} values"
        raise ValueError(f"{len(keys)} keys but {count}; give a list with one value (or list of device values) per key")
    joined: dict[Key, list[torch.Tensor]] = {}
    for one, value in zip(keys, values, strict=True):
        joined.setdefault(one, []).extend(_device_values(one, value))
    return list(joined), list(joined.values())


def _checked_key(key: Any) -> Key:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(f"key {key!r} is {type(key).__name__}; keys are int or str")
    return key


def _device_values(key: Key, value: Any) -> list[torch.Tensor]:
    values: Iterable[Any] = [value] if isinstance(value, torch.Tensor) else value
    result = list(values)
    if not result:
        raise ValueError(f"key {key!r} has an empty list of values")
    for one in result:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"the value of key {key!r} is {type(one).__name__}, not a tensor")
    return result
