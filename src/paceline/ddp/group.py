"""The process group of torch.distributed whose backend is ``paceline``.

All tensors meet in host memory: those of a device are copied there and back by the group's thread, after the work that
the device had before. So ranks with unlike types of devices can be in one group.

PyTorch 2.13 renamed some methods; both names are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import distributed as dist

from paceline.collectives.errors import CollectiveError, RankEndedError
from paceline.collectives.planes.base import SUM, Alone, Reduction
from paceline.collectives.planes.hosts import GroupPlanes
from paceline.collectives.planes.servers import FarPlane
from paceline.ddp.described import DescribedGroup
from paceline.ddp.host_copy import (
    HostCopy,
    HostRow,
    Tensors,
    add_sparse,
    check_dense,
    check_parts,
    check_rank,
    check_size,
    copying,
    deadline,
    is_linear,
    operation,
    ready,
    reduction_of,
    refuse_shards,
    rows,
    sizes,
)
from paceline.ddp.objects import may_be_objects
from paceline.ddp.pairs import Pairs
from paceline.ddp.work import Runner, Work
from paceline.errors import DeadlineError, PacelineError, PeerDiedError
from paceline.net.security import Security
from paceline.torch_hooks.untraced import untraced
from paceline.worker import alone
from paceline.worker.session import Session

#: How long a rank that ended may take until the scheduler knows why.
_WHY_S = 3.0


@untraced
class PacelineGroup(DescribedGroup):
    """A process group whose data moves through shared memory and the job's servers.

    Args:
        name: name of the group, the same on all members and of no other group.
        members: workers of the group, by rank in it.

    Raises:
        DeadlineError: not all members came in time; the text names them.
    """

    _created: ClassVar[Counter[tuple[object, ...]]] = Counter()

    def __init__(self, session: Session, name: str, members: Sequence[int], timeout: timedelta) -> None:
        super().__init__(name, members, session.rank)
        self._session, self._timeout_s = session, deadline(timeout)
        # A name comes again after destroy_process_group, perhaps for other members: some have not seen it before.
        named = name, *members
        self._created[named] += 1
        self._key = f"{name}#{self._created[named]}.{crc32(repr(named).encode()):08x}"
        self._pairs = Pairs(session, self._key, self._members)
        self._reductions: dict[tuple[Any, torch.dtype], Reduction] = {}
        alone = len(members) == 1
        try:
            self._hosts = None if alone else GroupPlanes(session, self._key, self._members, self._timeout_s)
        except PacelineError as error:
            raise self._explained(error, "the start", self._timeout_s) from error
        self._plane = self._hosts.plane if self._hosts is not None else Alone()
        self._runner = Runner(f"paceline-{name}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of later operations."""
        self._timeout_s = timeout.total_seconds()

    def check_objects(self) -> None:
        """Refuse objects in a job without a key, in which anybody could send them.

        Raises:
            ConfigError: the job has none.
        """
        if self.size() > 1:
            Security.of(self._session.settings).check_objects()

    def shutdown(self) -> None:
        """End the group's thread, and release its memory."""
        if self._runner.close(1.0) and self._hosts is not None:
            self._hosts.close()

    abort = shutdown

    # ---- operations of all ranks -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all ranks."""
        op = operation(opts)
        how = [self._reduction(one, op) for one in tensors]
        begun: list[tuple[HostCopy, Callable[[], None]]] = []

        def begin(plane: FarPlane) -> None:
            for one, reduction in zip(tensors, how, strict=True):
                host = HostCopy(one)
                begun.append((host, plane.begin_allreduce(host.flat, host.flat, reduction)))

        def job() -> None:
            if begun:
                for host, end in begun:
                    end()
                    host.put()
                return
            for one, reduction in zip(tensors, how, strict=True):
                if one.is_sparse:
                    add_sparse(self._plane, one, reduction, self._members)
                    continue
                host = HostCopy(one)
                self._plane.allreduce(host.flat, host.flat, reduction)
                host.put()

        what = f"all_reduce{sizes(tensors)}"
        return self._run(what, job, tensors, opts, begin=begin, takes_sparse=is_linear(op))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce tensors together."""
        op = operation(opts)
        how = {one.dtype: self._reduction(one, op) for one in tensors}

        def job() -> None:
            for dtype in dict.fromkeys(one.dtype for one in tensors):
                alike = HostRow([one for one in tensors if one.dtype == dtype])
                flat = alike.content.view(how[dtype].dtype)
                self._plane.allreduce(flat, flat, how[dtype])
                alike.put()

        return self._run(f"all_reduce{sizes(tensors)}", job, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor; only the root gets the result."""
        (tensor,) = tensors
        how, is_root = self._reduction(tensor, operation(opts)), opts.rootRank == self.rank()
        check_rank("reduce", opts.rootRank, self.size())

        def job() -> None:
            host = HostCopy(tensor)
            target = host.flat if is_root else torch.empty_like(host.flat)
            self._plane.allreduce(host.flat, target, how)
            host.put()

        return self._run(f"reduce{sizes(tensors)}", job, tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Overwrite tensors with those of the root."""
        root = opts.rootRank
        check_rank("broadcast", root, self.size())

        def job() -> None:
            for one in tensors:
                host = HostCopy(one, reads=root == self.rank())
                self._plane.broadcast(host.as_bytes, root)
                if root != self.rank():
                    host.put()

        return self._run(f"broadcast{sizes(tensors)}", job, tensors, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks have called this."""
        flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
        how = Reduction(SUM, flag.dtype, self.size())
        return self._run("barrier", lambda: self._plane.allreduce(flag, flag, how), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called this; the error names all that have not."""
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # ---- operations that move parts --------------------------------------------------------------------------------

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        """Get the tensors of all ranks, each into its own."""

        def job() -> None:
            for outputs, mine in zip(output_tensors, input_tensors, strict=True):
                row = HostRow(outputs, reads=False)
                self._plane.allgather(HostCopy(mine).as_bytes, row.content, row.counts)
                row.put()

        for outputs, mine in zip(output_tensors, input_tensors, strict=True):
            check_parts("all_gather", outputs, self.size(), mine, self.rank())
        flat = [one for row in output_tensors for one in row]
        return self._run(f"all_gather{sizes(flat)}", job, output_tensors, opts, input_tensors)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        """Get lists of tensors of all ranks, by rank."""
        return self.allgather(list(zip(*output_lists, strict=True)), input_list, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Get the tensors of all ranks, one after the other in one."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Do so for several tensors."""
        refuse_shards()

        def job() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                target, source = HostCopy(output, reads=False), HostCopy(mine)
                self._plane.allgather(source.as_bytes, target.as_bytes, [source.as_bytes.numel()] * self.size())
                target.put()

        for output, mine in zip(outputs, inputs, strict=True):
            check_size("all_gather", output, mine, self.size())
        return self._run(f"all_gather{sizes(outputs)}", job, outputs, opts, inputs)

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any) -> Work:
        """Get the tensors of all ranks at the root."""
        root, outputs = opts.rootRank, [one for row in output_tensors for one in row]
        check_rank("gather", root, self.size())
        if root == self.rank():
            check_parts("gather", outputs, self.size(), input_tensors[0])

        def job() -> None:
            mine, row = HostCopy(input_tensors[0]).as_bytes, HostRow(outputs, reads=False)
            counts = [[mine.numel() if receiver == root else 0 for receiver in self._ranks] for _ in self._ranks]
            self._plane.alltoall(mine, row.content, counts)
            row.put()

        return self._run(f"gather{sizes(input_tensors)}", job, output_tensors, opts, input_tensors)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> Work:
        """Get a tensor of the root's list."""
        root, inputs = opts.rootRank, [one for row in input_tensors for one in row]
        check_rank("scatter", root, self.size())
        if root == self.rank():
            check_parts("scatter", inputs, self.size(), output_tensors[0])

        def job() -> None:
            mine = HostCopy(output_tensors[0], reads=False)
            size = mine.as_bytes.numel()
            counts = [[size if sender == root else 0 for _ in self._ranks] for sender in self._ranks]
            self._plane.alltoall(HostRow(inputs).content, mine.as_bytes, counts)
            mine.put()

        return self._run(f"scatter{sizes(output_tensors)}", job, output_tensors, opts, inputs)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce lists of tensors, and get the one of this rank."""
        how = self._reduction(output_tensors[0], operation(opts))

        def job() -> None:
            for output, inputs in zip(output_tensors, input_tensors, strict=True):
                row, target = HostRow(inputs), HostCopy(output, reads=False)
                counts = [one // target.flat.itemsize for one in row.counts]
                self._plane.reducescatter(row.content.view(target.flat.dtype), target.flat, counts, how)
                target.put()

        for output, inputs in zip(output_tensors, input_tensors, strict=True):
            check_parts("reduce_scatter", inputs, self.size(), output, self.rank())
        flat = [one for row in input_tensors for one in row]
        return self._run(f"reduce_scatter{sizes(flat)}", job, output_tensors, opts, flat)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor, and get the part of this rank."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Do so for several tensors."""
        refuse_shards()
        op = operation(opts)
        how = [self._reduction(one, op) for one in outputs]

        def job() -> None:
            for output, mine, reduction in zip(outputs, inputs, how, strict=True):
                target = HostCopy(output, reads=False)
                counts = [target.flat.numel()] * self.size()
                self._plane.reducescatter(HostCopy(mine).flat, target.flat, counts, reduction)
                target.put()

        for output, mine in zip(outputs, inputs, strict=True):
            check_size("reduce_scatter", mine, output, self.size())
        return self._run(f"reduce_scatter{sizes(inputs)}", job, outputs, opts, inputs)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """Send a tensor to each rank."""
        size, given = self.size(), (len(input_tensors), len(output_tensors))
        if given != (size, size):
            raise ValueError(f"all_to_all of {size} ranks needs {size} tensors on each side; given are {given}")

        def job() -> None:
            inputs, outputs = HostRow(input_tensors), HostRow(output_tensors, reads=False)
            self._exchange(inputs.content, outputs.content, inputs.counts, outputs.counts)
            outputs.put()

        return self._run("all_to_all", job, output_tensors, opts, input_tensors)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:  # fmt: skip
        """Send parts of a tensor to the ranks."""
        sent, received = rows(input, input_splits, self.size()), rows(output, output_splits, self.size())

        def job() -> None:
            source, target = HostCopy(input), HostCopy(output, reads=False)
            self._exchange(source.as_bytes, target.as_bytes, sent, received)
            target.put()

        return self._run("all_to_all", job, [output], opts, [input])

    def _exchange(
        self, source: torch.Tensor, target: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        """Tell all ranks how many bytes each sends, and send them."""
        counts = torch.empty(self.size() ** 2, dtype=torch.int64, device="cpu")
        self._plane.allgather(torch.tensor(sent, device="cpu"), counts, [self.size()] * self.size())
        table = counts.view(self.size(), self.size()).tolist()
        found = [row[self.rank()] for row in table]
        fits = list(received) == found
        into = target if fits else torch.empty(sum(found), dtype=torch.uint8, device="cpu")
        self._plane.alltoall(source, into, table)
        if not fits:
            raise ValueError(f"rank {self.rank()} was sent {found} bytes by the ranks, and expects {list(received)}")

    # ---- between two ranks -----------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        """Send a tensor to a rank."""
        check_dense(tensors)
        check_rank("send", dst, self.size())
        return self._pairs.send(tensors[0], dst, tag, self._timeout_s)

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        """Receive a tensor from a rank."""
        check_dense(tensors)
        check_rank("recv", src, self.size())
        return self._pairs.recv(tensors[0], src, tag, self._timeout_s)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from the rank that sends first."""
        check_dense(tensors)
        return self._pairs.recv_any(tensors[0], tag, self._timeout_s)

    # ---- running ---------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> range:
        return range(len(self._members))

    def _reduction(self, tensor: torch.Tensor, op: Any) -> Reduction:
        """Return how tensors like this one are reduced.

        Raises:
            ValueError: the operation has no meaning for them.
        """
        alone.note_exchange()
        dtype = tensor.dtype
        found = self._reductions.get((op, dtype))
        if found is None:
            found = self._reductions[op, dtype] = reduction_of(op, dtype, self.size())
        return found

    def _run(
        self, what: str, job: Callable[[], None], result: Tensors | Sequence[Tensors], opts: Any, inputs: Tensors = (),
        begin: Callable[[FarPlane], None] | None = None, takes_sparse: bool = False,
    ) -> Work:  # fmt: skip
        self._session.check_process()
        work = Work(f"{what} of group {self._named!r}", result)
        given = getattr(opts, "timeout", None)
        timeout_s = given.total_seconds() if given is not None and given > timedelta(0) else self._timeout_s
        used = [*work.tensors, *inputs]
        check_dense(used, but_sparse=takes_sparse)
        is_ready, alike = ready(used), what + (f" of {used[0].dtype}" if used else "")
        seals = may_be_objects(used)

        def run() -> None:
            work.device_s = is_ready()
            if self._hosts is not None:
                self._hosts.start(alike, work.number, timeout_s, seals)
            try:
                with copying(used):
                    job()
            except PacelineError as error:
                raise self._explained(error, f"{what} (number {work.number})", timeout_s) from error

        def begin_early() -> None:
            plane = None if self._hosts is None else self._hosts.early(alike, work.number, timeout_s, seals)
            if begin is not None and plane is not None:
                begin(plane)

        # Devices may still compute their tensors, and sparse ones are no elements in a row.
        is_early = begin is not None and all(one.is_cpu and not one.is_sparse for one in work.tensors)
        is_awaited = not getattr(opts, "asyncOp", True)
        return self._runner.run(work, run, is_awaited=is_awaited, begin=begin_early if is_early else None)

    def _explained(self, error: PacelineError, what: str, timeout_s: float) -> PacelineError:
        """Return an error that names the operation, the group and the way out."""
        who = f"rank {self._session.rank}: {what} of group {self._named!r}"
        if isinstance(error, RankEndedError | PeerDiedError):
            # The failure of the job, for which a process that ended is the reason; or one ended without an error.
            return self._session.await_failure(_WHY_S) or PeerDiedError(
                f"{who}: {error}. All ranks of a group must call the same operations: one that ends its loop earlier "
                "tells the others before (all_reduce of the decision), or trains in model.join()"
            )
        if isinstance(error, DeadlineError | CollectiveError):
            return DeadlineError(
                f"{who} did not end within its timeout of {timeout_s:g} s: {error}. Either that rank is in another "
                "part of the script (all ranks of a group must call the same operations in the same order; py-spy dump "
                "--pid shows where it is), or it needs longer: then raise timeout= of init_process_group"
            )
        return error

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
