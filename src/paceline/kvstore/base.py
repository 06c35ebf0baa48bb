"""The interface of every key-value store, and the registry of store types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, Unpack, overload

import torch

from paceline.layout.keys import Key, Keys, Values

if TYPE_CHECKING:
    from paceline.compression import Compression
    from paceline.updaters import KeyOptions, Options
    from paceline.updaters.option_names import OptimizerOptions

#: A registered name, an instance or a class.
OptimizerLike: TypeAlias = str | torch.optim.Optimizer | type[torch.optim.Optimizer]
Updater: TypeAlias = Callable[[Key, torch.Tensor, torch.Tensor], None]
#: An optimizer's state of one key: tensors by name, in the key's shape or with a single element.
KeyState: TypeAlias = Mapping[str, torch.Tensor]

StoreClass = TypeVar("StoreClass", bound="type[KVStoreBase]")


class KVStoreBase:
    """A store of named tensors that devices and workers push to and pull from.

    A third-party store needs ``broadcast`` and ``pushpull`` (and ``is_capable``, ``type``, ``rank``,
    ``num_workers``, which have defaults) and works with ``Trainer`` and ``Module``. Register it with
    :meth:`register` and create it by its class name in lower case. Methods that it does not define raise
    ``NotImplementedError`` with the store's type and the method's name.
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

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Initialise keys with rank 0's values and copy them into ``out``."""
        raise self._lacks("broadcast")

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push ``value`` and pull the result into ``out`` (into ``value`` itself when ``out`` is None)."""
        raise self._lacks("pushpull")

    @overload
    def set_optimizer(self, optimizer: str | torch.optim.Optimizer, **options: Unpack[OptimizerOptions]) -> None: ...

    @overload
    def set_optimizer(self, optimizer: type[torch.optim.Optimizer], **options: Any) -> None: ...

    def set_optimizer(self, optimizer: OptimizerLike, **options: Any) -> None:
        """Set the optimizer that runs in the store.

        Args:
            optimizer: a registered name, a class or an instance.
            **options: options of the class, and of :func:`paceline.updaters.make_spec`: ``keys``, ``multi_precision``,
                ``momentum_form``. MXNet's options are accepted too: ``rescale_grad`` (a factor on the merged gradient),
                ``clip_gradient`` (largest absolute value of its elements after that, before weight decay), and
                ``lr_scheduler``: a function ``num_update -> rate`` that sets the rate of every push. ``num_update``
                counts this worker's pushes of the key that it has pushed most often, from 1 on (``begin_num_update``
                is added).

        Raises:
            ValueError: the name is unknown, or the optimizer rejects an option's value.
            TypeError: not an optimizer, an unknown option, or a scheduler of torch.
        """
        raise self._lacks("set_optimizer")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state (safetensors with a manifest) and each worker's residuals.

        With ``dump_optimizer`` also its options, as they are now: loading the file sets them too.
        """
        raise self._lacks("save_optimizer_states")

    def load_optimizer_states(self, fname: str) -> None:
        """Read files of ``save_optimizer_states``, with any number of servers."""
        raise self._lacks("load_optimizer_states")

    def set_gradient_compression(self, compression_params: Compression) -> None:
        """Compress pushes: ``{"type": "2bit", "threshold": 0.5}``. Before the first push.

        Distributed stores also compress pulls: ``{"type": "int8", "leg": "pull"}``, or ``both``.
        """
        raise self._lacks("set_gradient_compression")

    @property
    def keeps_residuals(self) -> bool:
        """Whether the codec of pushes keeps residuals: it adds the rest that it did not send to the next push."""
        return False

    def codec_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return the state of this worker's codec of pushes, by key: residuals and other state of the codec."""
        return {}

    def set_codec_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """Set states that :meth:`codec_states` returned. The state of other keys is reset.

        Raises:
            ValueError: the states are of another codec or model.
        """
        if states:
            raise ValueError(f"a {self.type} store keeps no residuals")

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has a capability. The only one is ``optimizer``: it can run the optimizer.

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
    def leaving(self) -> bool:
        """Whether this worker is to leave the job after its step, while the others go on: a script may save first."""
        return False

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        return 1

    def stats(self) -> dict[str, Any]:
        """Counters of the consistency rule: updates, staleness histogram, step mass, data mass per worker.

        A store without servers has none.
        """
        return {}

    def close(self) -> None:
        """Release the store's resources. Idempotent."""

    def _lacks(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"a {self.type} store has no {method}: {type(self).__name__} does not define it")


class KVStore(KVStoreBase):
    """The whole interface of paceline's own stores.

    ``push`` **sums** the values of all devices and workers. With an optimizer or updater the sum is its gradient;
    without one the sum replaces the stored value. Keys are all int (numpy's too) or all str. Values are tensors,
    lists of tensors (one per key), or lists of lists (device values of each key). The store does not keep the caller's
    tensors.

    A key that was initialised with a row-sparse value is *row-sparse*: a push of rows updates only those rows, if the
    optimizer has such a form. Rows that are pushed to any other key are added as a dense value.

    Attributes:
        samples: number of samples behind the next pushes; each type of store decides how this weighs them.
    """

    samples: float = 1.0

    def init(self, key: Keys, value: Values) -> None:
        """Initialise keys, once each, with rank 0's values.

        Raises:
            KeyMismatchError: a key is initialised already, or its shape or dtype differs between workers.
            TypeError: the store would have both int and str keys.
        """
        raise self._lacks("init")

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values; device values of one key are summed. Returns before the update is applied."""
        raise self._lacks("push")

    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values into ``out``, after this worker's own pushes of those keys are applied.

        A row-sparse ``out`` is not changed (this is logged once per key), unless ``ignore_sparse`` is False: then it
        gets all rows that are not 0.
        """
        raise self._lacks("pull")

    @overload
    def set_updater(self, updater: str, **options: Unpack[OptimizerOptions]) -> None: ...

    @overload
    def set_updater(self, updater: Updater) -> None: ...

    def set_updater(self, updater: str | Updater, **options: Any) -> None:
        """Set how a push changes the stored value: a registered name (``assign``, ``add``, ``test``) or a callable
        ``updater(key, merged, stored)`` that works in place (callables only if the store is in this process).
        """
        raise self._lacks("set_updater")

    def set_options(self, groups: Sequence[Options] = (), keys: Mapping[Key, KeyOptions] | None = None) -> None:
        """Change options of the optimizer, such as learning rates, from the next push on. Its state is not changed.

        Args:
            groups: options per param group; empty: no change.
            keys: param group and multipliers of keys that differ from group 0 and 1.0; None: no change.

        Raises:
            ValueError: the store runs no optimizer.
        """
        raise self._lacks("set_options")

    def options(self) -> list[Options]:
        """Return the optimizer's current options per param group.

        Options that were not set have the defaults of the optimizer's class, if this process knows the class.

        Raises:
            ValueError: the store runs no optimizer.
        """
        raise self._lacks("options")

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first param group, without multipliers.

        Raises:
            ValueError: the store runs no optimizer, or one without a learning rate.
        """
        rate = self.options()[0].get("lr")
        if rate is None:
            raise ValueError(f"the optimizer of the {self.type} store was given no learning rate; set_learning_rate")
        return float(rate)  # type: ignore[arg-type]

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all param groups from the next push on. The optimizer's state is not changed.

        Raises:
            ValueError: ``lr`` is not a valid rate, or the store runs no optimizer.
        """
        if not 0 <= lr < float("inf"):
            raise ValueError(f"learning rate {lr} is not a finite number of 0 or more")
        self.set_options([{**group, "lr": float(lr)} for group in self.options()])

    def optimizer_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return copies of the optimizer's state of every key, after this worker's own pushes are applied."""
        raise self._lacks("optimizer_states")

    def set_optimizer_states(self, states: Mapping[Key, KeyState]) -> None:
        """Replace the optimizer's state of some keys, after this worker's own pushes are applied.

        Raises:
            ValueError: a tensor does not have its key's shape.
        """
        raise self._lacks("set_optimizer_states")

    def for_optimizer(self, mean: bool | None = None, clip_norm: float = 0.0) -> KVStore:
        """Return a store for one optimizer or trainer: this one if it is unused, else a new one of the same kind.

        So several optimizers or trainers can share one store without mixing their keys and updates. Every worker calls
        it in the same order. A new store has the codecs of this one, but for those that the first optimizer has set.

        Args:
            mean: merge to the mean over samples instead of the sum; None: as this store was made.
            clip_norm: the largest norm of a merged gradient over all keys; 0: no limit.

        Raises:
            ValueError: a largest norm, and the store cannot clip.
        """
        raise self._lacks("for_optimizer")

    def row_sparse_pull(self, key: Keys, out: Values, priority: int = 0, row_ids: Values | None = None) -> None:
        """Pull only some rows, after this worker's own pushes.

        Args:
            key: row-sparse keys.
            out: a sparse target then holds only the requested rows; in a dense target of the key's shape the requested
                rows are set and the others are not changed.
            priority: ignored.
            row_ids: row numbers of any integer dtype and shape, one tensor per key or per target; repeats are allowed.

        Raises:
            ValueError: no ``row_ids``, numbers outside of the value, or another shape.
        """
        raise self._lacks("row_sparse_pull")

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has a capability. All of paceline's own stores can run the optimizer."""
        super().is_capable(capability)
        return True

    def barrier(self) -> None:
        """Wait until all workers have called this."""

    def num_dead_nodes(self) -> int:
        """Return the number of members of the job that are known to be dead."""
        return 0

    def send_command_to_servers(self, head: str, body: str = "") -> list[str]:
        """Run a registered server command on every server and return the answers in server order."""
        raise ValueError(f"a {self.type} store has no servers to send {head!r} to")
