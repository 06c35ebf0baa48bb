"""Tensors that all workers have from rank 0 beside a trainer's parameters: buffers, and parameters of other networks.

Through servers, buffers come when they are read: as a network goes into evaluation mode, and for ``state_dict``. Stores
that only sum give all workers rank 0's with each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.mx.gluon.parameter import Replicas
from paceline.optim.buffers import Buffers
from paceline.optim.shared_tensors import FollowingBuffers, addends, broadcast, set_all, shared_of


class SharedBuffers:
    """Gives all workers rank 0's buffers of some networks. Collective: every worker creates it.

    Args:
        store: a store of several workers.
        nets: networks, distinct and with known shapes. Their parameters that no trainer has become rank 0's once.
        prefix: prefix of the keys in a store that has no namespaces.
    """

    def __init__(self, store: KVStoreBase, nets: Sequence[Replicas], prefix: str = "") -> None:
        self._store, self._models, self._prefix = store, [net.replicas for net in nets], prefix
        params = [one for net in nets for one in net.collect_params().values()]
        trained = [copy for one in params if one.is_taken for copy in one.tensors()]
        self._on_servers: Buffers | None = None
        self._summed: FollowingBuffers | None = None
        if not (shared := shared_of(self._models, trained)):
            return
        if isinstance(store, DistStore):
            self._on_servers = Buffers(store, self._models, trained)
        else:
            broadcast(store, {prefix + name: copies for name, copies in shared.items()})
            self._summed = FollowingBuffers(self._models, store.rank)

    def publish(self) -> None:
        """Send rank 0's changed buffers to the other workers. Every worker calls it before it pushes."""
        if self._on_servers is not None:
            under_way = self._on_servers.publish()
            if under_way is not None:
                under_way.wait()
            self._on_servers.pushed()
        elif self._summed is not None and (values := addends(self._store, self._summed.told())):
            self._store.pushpull([self._prefix + name for name in values], list(values.values()))
            set_all(self._summed.followed(values), values)

    def settled(self) -> None:
        """Note that the push that followed :meth:`publish` is answered. Every worker calls it."""
        if self._on_servers is not None:
            self._on_servers.settled()

    def forward_begins(self) -> bool:
        """Note that a forward pass begins; returns whether :meth:`take` must come before it."""
        return self._on_servers is not None and self._on_servers.forward_begins()

    def take(self) -> None:
        """Pull rank 0's buffers of its last step, unless this worker has them."""
        if self._on_servers is not None:
            self._on_servers.take()
