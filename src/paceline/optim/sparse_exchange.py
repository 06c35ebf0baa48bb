"""Parameters with sparse gradients: workers push only rows, and servers answer with only rows.

``update="worker"``: the answers are merged rows, and the servers store no weights of such a parameter.
``update="server"``: the servers hold the weights and run the lazy form of the optimizer; the answers are the rows of
the weights that changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.kvstore.dist import DistStore
from paceline.optim.binding import changed_here, is_finite, not_finite_in, sums_up
from paceline.updaters import KeyOptions, UpdaterSpec
from paceline.updaters.rows import of_rows
from paceline.worker.call_plan import Place
from paceline.worker.rows import RowExchange
from paceline.worker.traffic import Carried

Named = tuple[str, nn.Parameter]

#: Size of the parts, in bytes, in which rank 0 sends weights to the other workers.
_PART_BYTES = 16 * 1024 * 1024


def find_sparse(named: Iterable[Named], optimizer: torch.optim.Optimizer, model: nn.Module | None) -> list[Named]:
    """Return the parameters whose gradients will be sparse: known before any backward, the same on every worker.

    These are: all of ``SparseAdam``; those that belong only to modules with ``sparse=True`` (another module would make
    the gradient dense); and those that the user has marked: ``parameter.sparse_grad = True``.
    """
    owners: dict[nn.Parameter, list[bool]] = {}
    for module in () if model is None else model.modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(is_sparse)
    always = isinstance(optimizer, torch.optim.SparseAdam)
    return [
        (name, param)
        for name, param in named
        if param.dim() > 1
        and param.numel()
        and (always or getattr(param, "sparse_grad", False) or all(owners.get(param, [False])))
    ]


class SparseExchange:
    """Exchanges rows of the sparse parameters of one optimizer through one store.

    Collective: every worker creates it with the same parameters, after the store has its updater, and before its first
    push. In a round every worker pushes every parameter once, also those without a gradient.

    The names of the parameters are the keys.

    Raises:
        ValueError: ``worker`` in another mode; ``server`` with an optimizer that torch does not run on rows, or with
            options that change other rows too.
        KeyMismatchError: the models of the workers differ.
    """

    def __init__(self, store: DistStore, named: Sequence[Named], update: Literal["worker", "server"]) -> None:
        self._store, self._in_worker = store, update == "worker"
        self._places: dict[nn.Parameter, tuple[str, Place]] = {}
        self._under_way: dict[nn.Parameter, RowExchange] = {}
        self._last: dict[nn.Parameter, RowExchange] = {}
        """The exchanges of the last round."""
        self._versions: dict[nn.Parameter, int] = {}
        """torch's count of in-place changes of each weight, as of the servers' last answer."""
        self.add(named)

    def add(self, named: Sequence[Named]) -> None:
        """Add parameters, between rounds. Every worker calls it."""
        names, params = [name for name, _ in named], [param for _, param in named]
        if not self._in_worker:
            _check_server(self._store.spec, names)
        if names:
            self._store.add_row_keys(names, params, "merged" if self._in_worker else "changed")
            _give_weights(self._store, named)
        places = self._store.table.locate(names)
        self._places |= {param: (name, place) for (name, param), place in zip(named, places, strict=True)}
        self._versions |= {param: param._version for param in params}

    def __contains__(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is exchanged here."""
        return param in self._places

    # ---- a round, as of paceline.optim.exchange ----------------------------------------------------------------------

    def push_rest(self, carried: Carried) -> None:
        """Push the gradients of all parameters, once per round. Does not wait.

        A parameter without gradient is pushed as absent.

        Raises:
            NonFiniteError: a gradient is NaN or Inf, and ``carried`` says that this is an error.
            PacelineError: a gradient is not row-sparse, or was pushed in this round already; with ``server``, weights
                were changed in this process alone (changes through ``.data`` are not detected).
        """
        counts = carried.samples and not carried.skip
        for param, (name, place) in self._places.items():
            if carried.nan == "error" and counts and param.grad is not None and not is_finite(param.grad):
                raise not_finite_in(self._store, name, carried.round)
            if param in self._under_way:
                raise PacelineError(f"the gradient of {name!r} was pushed already; finish the round first")
            _check_rows(name, param)
            if not self._in_worker and param._version != self._versions[param]:
                raise changed_here(self._store, name)
            self._under_way[param] = self._store.rows.exchange(place, param.grad, carried)

    def settle(self) -> None:
        """Wait for all answers of the round, and end it; changes no weight or gradient.

        Raises:
            PeerDiedError: a member of the job died.
            DeadlineError: other workers did not push in time.
        """
        self._last, self._under_way = self._under_way, {}
        self._store.session.wait([one.call for one in self._last.values()])

    def take(self) -> None:
        """Use the answers of the last round.

        With ``worker`` every ``param.grad`` becomes the merged gradient, the same bits on every worker, or None where
        no worker had one. With ``server`` ``param`` gets the new weights; ``param.grad`` is not changed.
        """
        for param, one in self._last.items():
            if self._in_worker:
                param.grad = None if one.rows is None else one.rows.to(param.device)
            else:
                self._bring(one, param)

    def _bring(self, one: RowExchange, param: nn.Parameter) -> None:
        _put(one.rows, param)
        self._versions[param] = param._version

    def suspicious(self) -> bool:
        """Return whether the rows of the last round may hold NaN or Inf. False is certain, True is not."""
        return not all(one.rows is None or sums_up(one.rows) for one in self._last.values())

    def not_finite(self) -> list[str]:
        """Return the names of the parameters of which this worker pushed NaN or Inf in the last round."""
        pushed = {self._places[param][0]: one.sent for param, one in self._last.items()}
        return [name for name, rows in pushed.items() if rows is not None and not bool(rows.values().isfinite().all())]

    def refresh(self) -> None:
        """Pull the rows that changed on the servers since the last answer. With ``worker`` it does nothing."""
        if self._in_worker:
            return
        found = {param: self._store.rows.news(place) for param, (_, place) in self._places.items()}
        self._store.session.wait([one.call for one in found.values()])
        for param, one in found.items():
            self._bring(one, param)

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's. Collective, between rounds."""
        named = [(name, param) for param, (name, _) in self._places.items()]
        if self._in_worker and named:
            _give_weights(self._store, named)
        elif named:
            self._store.barrier()
            if self._store.session.is_lead:
                self._store.set_values([name for name, _ in named], [param.data for _, param in named])
            self._store.barrier()
            self.refresh()


def _give_weights(store: DistStore, named: Sequence[Named]) -> None:
    """Send rank 0's weights to all workers, part by part: rank 0 pushes rows, the others push none."""
    other = store.sibling("rest")
    own = float(other.rank == 0)
    carried = Carried(own, own)
    names = [name for name, _ in named]
    other.add_row_keys(names, [param for _, param in named], "merged")
    for (_, param), place in zip(named, other.table.locate(names), strict=True):
        for rows in _parts(param):
            one = other.rows.exchange(place, _rows_of(param, rows) if other.rank == 0 else None, carried)
            other.session.wait([one.call])
            if other.rank:
                _put(one.rows, param)
    other.close()


#: Optimizers that torch runs on sparse gradients; for each the options that forbid this or change all rows.
_ON_ROWS = {"sgd": ("momentum", "weight_decay"), "adagrad": ("weight_decay",), "sparseadam": ()}


def _check_server(spec: UpdaterSpec, names: Sequence[str]) -> None:
    """Raise for settings with which servers would update differently from torch in one process."""
    for name in names:
        if spec.name not in _ON_ROWS:
            raise ValueError(
                f"the gradients of {name!r} are sparse, which torch's {spec.name!r} does not support; use SparseAdam, "
                "SGD or Adagrad for it, or sparse=False"
            )
        options = spec.groups[spec.keys.get(name, KeyOptions()).group]
        wrong = next((one for one in _ON_ROWS[spec.name] if options.get(one)), None)
        if wrong is not None:
            raise ValueError(
                f"the gradients of {name!r} are sparse, and servers update only their rows, but {wrong} of "
                f'{spec.name!r} changes all rows: use update="worker" (dist_sync), {wrong}=0 or sparse=False'
            )


def _check_rows(name: str, param: nn.Parameter) -> None:
    grad = param.grad
    if grad is not None and not (grad.is_sparse and grad.sparse_dim() == 1):
        kind = "dense" if not grad.is_sparse else "sparse, but not in its rows alone"
        raise PacelineError(
            f"the gradient of {name!r} is {kind}, but its module or its optimizer announced rows. Another layer or a "
            "penalty adds a dense gradient: create the embedding with sparse=False"
        )


def _parts(param: nn.Parameter) -> Iterator[torch.Tensor]:
    height, step = param.shape[0], max(1, _PART_BYTES // (math.prod(param.shape[1:]) * param.dtype.itemsize))
    return (torch.arange(start, min(start + step, height), device="cpu") for start in range(0, height, step))


def _rows_of(param: nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    values = param.detach()[rows.to(param.device)].cpu()
    return of_rows(rows, values, param.shape)


@torch.no_grad()
def _put(rows: torch.Tensor | None, param: nn.Parameter) -> None:
    if rows is not None:
        param.index_copy_(0, rows.indices()[0].to(param.device), rows.values().to(param.device))
