"""Files of a large data set, dealt to workers: equal parts of the list, unequal ones, or one after the other.

============  ========================================  ================================  ==========================
``shares``    this worker's shards of an epoch          of a worker that dies or leaves   processes of a DataLoader
============  ========================================  ================================  ==========================
``equal``     a part of the order                       the rest of its part is left out  read every n-th of the part
fractions     likewise, in proportion                   likewise                          likewise
``measured``  likewise, by speeds before the epoch      likewise; the next epoch has all  likewise
``pool``      the next one when the last is trained on  go to others, from their start    are refused
============  ========================================  ================================  ==========================
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.fetching import is_in_loader
from paceline.data.ledger import State, check_kind, epoch_order
from paceline.data.partition import check_epoch, check_part, fractions_of, own_part, part_of
from paceline.data.pool import session_of, walker_of
from paceline.data.sampler import ShardedSampler
from paceline.hetero import split_evenly
from paceline.kvstore.agreement import Fact
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.kvstore.start_checks import agree
from paceline.worker.session import Session

_RATE = struct.Struct("<d")


class Shards(IterableDataset[str], abc.ABC):
    """The shards of one worker, epoch by epoch. Made by :func:`shards`.

    Attributes:
        urls: shards of all workers.
    """

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[str]:
        """Yield this worker's shards of the next epoch; in a process of a ``DataLoader``, its part of them.

        Raises:
            ValueError: shards would be lost or read twice; the text says what to do.
        """
        process = get_worker_info()
        first, every = (0, 1) if process is None else (process.id, process.num_workers)
        return (self.urls[index] for index in self._indices(first, every))

    def split(self, source: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
        """Deal the shards of a ``webdataset`` pipeline: ``wds.WebDataset(urls, nodesplitter=shards.split)``.

        ``webdataset`` itself divides a worker's shards among the processes of a ``DataLoader``.

        Raises:
            ValueError: the pipeline has other shards.
        """
        if [one["url"] for one in source] != self.urls:
            raise ValueError("the shards of the WebDataset are not those of paceline.data.shards; give both the same")
        return ({"url": self.urls[index]} for index in self._indices(0, 1))

    @abc.abstractmethod
    def _indices(self, first: int, every: int) -> Iterator[int]:
        """Deal indices into the list; in a process of a loader, every so-manieth of them from the first on."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next when none has begun."""

    @abc.abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. An epoch that was loaded by :meth:`load_state_dict` keeps its position.

        Call it before every epoch that the processes of a ``DataLoader`` read. With ``measured`` it waits for all
        workers, which divide the shards anew.

        Raises:
            ValueError: the epoch is negative.
        """

    @abc.abstractmethod
    def done(self) -> None:
        """Say that the last shard is trained on. Otherwise the request for the next one says it.

        A worker that leaves the loop calls it, so that the shard does not come again.
        """

    @abc.abstractmethod
    def state_dict(self) -> State:
        """Return where the epoch stands: plain numbers, fit for JSON. The shard under way counts as not read.

        Raises:
            ValueError: processes of a ``DataLoader`` read the epoch, so the loop's place in it is unknown.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, with the shards that are left.

        Raises:
            ValueError: in mid-epoch the shards, seed, ``shuffle`` and part must be the same as then.
        """


def shards(
    urls: Sequence[str | os.PathLike[str]],
    store: KVStoreBase | None = None,
    *,
    shares: str | os.PathLike[str] | Sequence[float] = "equal",
    num_parts: int | None = None,
    part_index: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    name: str = "shards",
) -> Shards:
    """Deal the files of a data set to the workers of a job: it yields paths or URLs, for any reader. ::

        urls = sorted(glob.glob("train-*.tar"))
        shards = paceline.data.shards(urls, store, shares="measured")
        samples = webdataset.WebDataset(urls, nodesplitter=shards.split, shardshuffle=False)
        loader = DataLoader(samples.decode("torchrgb").to_tuple("jpg", "cls"), batch_size=32, num_workers=4)
        for epoch in range(10):
            shards.set_epoch(epoch)
            for images, labels in loader:
                ...

    The order of the list follows from (``seed``, ``epoch``). Every shard is dealt once per epoch. A part has as many
    samples as its shards; where workers step together (``dist_sync``), a worker that has fewer batches than the others
    waits at the end of the epoch in ``store.barrier()``.

    From the pool a loop takes shards, and gives each to a loader of its own. So a shard is trained on when the loop
    asks for the next one; that of a worker that dies is given to another, which begins it again::

        for url in paceline.data.shards(urls, store, shares="pool"):
            samples = webdataset.WebDataset([url], shardshuffle=False).decode("torchrgb").to_tuple("jpg", "cls")
            for images, labels in DataLoader(samples, batch_size=32, num_workers=1):
                ...

    Args:
        urls: the shards, the same list on all workers.
        store: the job's store. Its workers check that they have the same list.
        shares: ``equal``: parts that differ by one shard at most; ``measured``: in proportion to how many samples per
            second each worker has computed (equal before that is known); a fraction per worker; a file of MXNet-G's
            data sharding, whose spans are taken as fractions; or ``pool``: each worker takes the next one when it has
            trained on the last, in modes without lock step.
        num_parts: number of parts, by default the workers of the job.
        part_index: which of them, by default this worker's rank.
        shuffle: without it, shards keep their order.
        seed: 0 or more, the same on all workers.
        name: name of the pool; shards of other data need a name of their own.

    Raises:
        TypeError: ``urls`` is one string.
        ValueError: there are fewer shards than parts, no such part, a negative seed, or a store that the shares do not
            go with.
        paceline.errors.ConfigError: other workers have another list, or the file cannot be used.
    """
    if isinstance(urls, str):
        raise TypeError(f"urls is one string, {urls!r}; give a list, such as sorted(glob.glob({urls!r}))")
    names = [os.fspath(one) for one in urls]
    if not names or seed < 0:
        raise ValueError(f"{len(names)} shards, seed {seed}: 1 and 0 are the least")
    _agree(names, store)
    if isinstance(shares, str) and shares == "pool":
        if store is None or num_parts is not None or part_index is not None:
            raise ValueError("a pool needs the job's store, and has no num_parts and part_index")
        return _PooledShards(names, store, shuffle, seed, name)
    own = own_part() if store is None else (store.num_workers, store.rank)
    parts, index = part_of(num_parts, part_index, lambda: own)
    if isinstance(shares, str) and shares == "measured" and (parts, index) != own:
        raise ValueError("shares='measured' divides the shards among the workers of the store; it has no other parts")
    measures = isinstance(shares, str) and shares == "measured" and isinstance(store, DistStore)
    team = store if measures and isinstance(store, DistStore) else None
    return _PartShards(names, parts, index, fractions_of(shares, parts), team, shuffle, seed)


def _agree(urls: list[str], store: KVStoreBase | None) -> None:
    if isinstance(store, DistStore):
        content = hashlib.sha256("\0".join(urls).encode(errors="surrogateescape")).hexdigest()[:12]
        text = f"{len(urls)}, from {urls[0]} to {urls[-1]}, in the order {content}"
        agree(store.session, "the shards", [Fact("shards", text)])


class _PartShards(Shards):
    """A part of the list, fixed for an epoch.

    Args:
        fractions: fraction of each part.
        team: the store whose workers measure their speeds for the fractions; None: they stay.
    """

    def __init__(
        self,
        urls: list[str],
        num_parts: int,
        part_index: int,
        fractions: Sequence[float],
        team: DistStore | None,
        shuffle: bool,
        seed: int,
    ) -> None:
        super().__init__(urls)
        if len(urls) < num_parts:
            raise ValueError(f"{len(urls)} shards are not enough for {num_parts} parts; write more and smaller ones")
        check_part(num_parts, part_index)
        if min(fractions) <= 0:
            raise ValueError(f"shares are {list(fractions)}; each fraction is above 0")
        self._part, self._fractions, self._team = [part_index, num_parts], list(fractions), team
        self._shuffle, self._seed = shuffle, seed
        self._sampler = self._sampler_of(self._bounds(self._fractions))
        self._is_pending, self._in_hand = True, False
        # Shared with the processes of a loader: number of the plan, the last one they have begun, and its contents.
        self._plan = torch.zeros(6, dtype=torch.int64, device="cpu")
        self._plan.share_memory_()  # type: ignore[no-untyped-call]
        self._tell()

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    @property
    def share(self) -> float:
        """This worker's part of the shards of the epoch. Where workers step together, batches should have it, too."""
        return len(self._sampler) / len(self.urls)

    def __len__(self) -> int:
        """Number of this worker's shards in the epoch."""
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        epoch = check_epoch(epoch)
        is_loaded = self._is_pending and self._sampler.position and not self._is_begun_elsewhere
        if not (is_loaded and epoch == self.epoch):
            self._begin(epoch)

    def done(self) -> None:
        self._in_hand = False

    def state_dict(self) -> State:
        if self._is_begun_elsewhere:
            raise ValueError(
                f"the processes of a DataLoader read epoch {self.epoch}, so it is not known which samples of it the "
                f"loop has had; call set_epoch({self.epoch + 1}) when the loop has ended, and then state_dict(). With "
                "num_workers=0 states in the middle of an epoch are known"
            )
        return {"part": self._part} | self._sampler.state_dict(self._sampler.position - self._in_hand)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_kind(state, "epoch", "position")
        if state["position"] and state.get("part") != self._part:
            raise ValueError(
                f"the state was taken in the middle of epoch {state['epoch']} for part {state.get('part')} (index, "
                f"number), this one is {self._part}"
            )
        sampler = self._sampler
        if self._team is not None and state["position"]:
            begin, end = state["span"]
            sampler = self._sampler_of((round(begin * len(self.urls)), round(end * len(self.urls))))
        sampler.load_state_dict(state)
        self._sampler, self._is_pending, self._in_hand = sampler, True, False
        self._tell()

    # ---- an epoch --------------------------------------------------------------------------------------------------

    def _indices(self, first: int, every: int) -> Iterator[int]:
        return self._deal() if get_worker_info() is None else self._deal_in_process(first, every)

    def _deal(self) -> Iterator[int]:
        if self._is_begun_elsewhere or not self._is_pending:
            self._begin(self.epoch + 1)
        self._is_pending = False
        for index in self._sampler:
            self._in_hand = True
            yield index
            self._in_hand = False

    def _deal_in_process(self, first: int, every: int) -> Iterator[int]:
        """Deal the shards that the main process has planned, in a process of a loader."""
        number, begun, epoch, position, start, stop = self._plan.tolist()
        process = get_worker_info()
        if process is not None and process.id == 0:
            if begun == number:
                raise ValueError(
                    f"a DataLoader has begun epoch {epoch} of these shards before; call set_epoch(epoch) in the main "
                    "process before each epoch, as its processes do not know of each other's"
                )
            self._plan[1] = number
        order = epoch_order(len(self.urls), self._seed, epoch, self._shuffle)
        yield from map(int, itertools.islice(order[start + position : stop], first, None, every))

    @property
    def _is_begun_elsewhere(self) -> bool:
        return bool(self._plan[0] == self._plan[1])

    def _begin(self, epoch: int) -> None:
        self._sampler = self._sampler_of(self._bounds(self._speeds()))
        self._sampler.set_epoch(epoch)
        self._is_pending, self._in_hand = True, False
        self._tell()

    def _tell(self) -> None:
        """Tell the processes of a loader the next plan."""
        state = self._sampler.state_dict()
        begin, end = (round(one * len(self.urls)) for one in state["span"])
        values = int(self._plan[0]) + 1, int(self._plan[1]), state["epoch"], state["position"], begin, end
        self._plan.copy_(torch.tensor(values, device="cpu"))

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _speeds(self) -> list[float]:
        """Return the fractions of the next epoch. Collective where they are measured."""
        if self._team is None:
            return self._fractions
        self._team.barrier()  # while some wait here, others may still need the rounds of all
        session = self._team.session
        said = session.gather("paceline/shards", _RATE.pack(_rate(session)))
        rates = [_RATE.unpack(one)[0] if one else None for one in said]
        if all(rate is None or rate > 0 for rate in rates):
            return [rate or 0.0 for rate in rates]
        return [0.0 if rate is None else 1.0 for rate in rates]

    def _bounds(self, fractions: Sequence[float]) -> tuple[int, int]:
        """Return where this worker's part begins and ends; each that has a fraction gets a shard at least."""
        parts = split_evenly(len(self.urls), fractions)
        for index, fraction in enumerate(fractions):
            if fraction > 0 and parts[index] == 0:
                parts[parts.index(max(parts))] -= 1
                parts[index] = 1
        stops = [0, *itertools.accumulate(parts)]
        return stops[self._part[0]], stops[self._part[0] + 1]

    def _sampler_of(self, bounds: tuple[int, int]) -> ShardedSampler:
        length = len(self.urls)
        span = bounds[0] / length, bounds[1] / length
        return ShardedSampler(length, span=span, even=False, shuffle=self._shuffle, seed=self._seed)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_team": None}


def _rate(session: Session) -> float:
    """Return the samples per second that this worker computes; 0: not known yet."""
    seconds = session.pace.seconds
    return session.pace.samples / seconds if seconds else 0.0


class _PooledShards(Shards):
    """The next shard of one queue of all workers."""

    def __init__(self, urls: list[str], store: KVStoreBase, shuffle: bool, seed: int, name: str) -> None:
        super().__init__(urls)
        settings: State = {"length": len(urls), "seed": seed, "shuffle": shuffle}
        session_of(store).joining.check_joined()
        self._walker = walker_of(session_of(store), name, settings, 0, by_push=False)

    @property
    def epoch(self) -> int:
        return self._walker.epoch

    def set_epoch(self, epoch: int) -> None:
        self._walker.set_epoch(epoch)

    def done(self) -> None:
        self._walker.finish()

    def state_dict(self) -> State:
        return self._walker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._walker.load_state_dict(state)

    def _indices(self, first: int, every: int) -> Iterator[int]:
        if is_in_loader():
            raise ValueError(
                "a DataLoader takes samples of the next shard before those of the last one are trained on, so those of "
                "a worker that dies would be lost. Loop over the shards, and make a loader for each: for url in "
                "shards: for batch in DataLoader(WebDataset([url]), ...)"
            )
        walk = self._walker.begin()
        order = epoch_order(epoch=self.epoch, **self._walker.settings)
        try:
            while (held := self._walker.take(walk, 1, lambda position: self.urls[int(order[position])])) is not None:
                yield int(order[held[0][0]])
        except GeneratorExit:
            self._walker.stop(walk)
            raise

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_walker": None}
