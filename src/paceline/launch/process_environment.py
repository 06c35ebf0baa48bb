"""The variables that every process of a job gets: paceline's own, torchrun's and MXNet's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from paceline import config
from paceline.consistency import groups_line
from paceline.launch.job_spec import JobSpec
from paceline.launch.placing import Placement
from paceline.launch.plan import Late, Value
from paceline.launch.worker_groups import WorkerGroup

#: Variables by which libraries recognise torchrun, and learn which node of the job they are on.
_TORCHRUN = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
)  # fmt: skip

_IDENTITY = (
    "role", "job_id", "job_key", "scheduler", "num_workers", "num_servers", "rank", "local_rank", "restart",
    "incarnation", "page_token",
)  # fmt: skip

#: Variables that give a process its identity. Only the launcher sets them.
OWNED = frozenset(map(config.variable, _IDENTITY)) | {
    "PACELINE_READY_FD", "PACELINE_ENDED_FD", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_DDP",
    *_TORCHRUN,
}  # fmt: skip

#: Switches off that ``import torch`` loads paceline, if it is not 1. The launcher sets it for workers of ``--ddp``.
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

#: What others say of the process in which a launcher or an agent runs: ranks of mpirun and srun, where there is one of
#: :data:`_FOREIGN_RANKS`, and those of horovodrun and torchrun.
_FOREIGN_RANKS = frozenset({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"})
_FOREIGN_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "PMI2_", "HYDI_", "MPI_LOCAL", "MPIR_", "SLURM_STEP_", "SLURM_STEPID")
_FOREIGN_NAMES = frozenset(
    f"SLURM_{name}"
    for name in ("PROCID", "LOCALID", "NODEID", "NTASKS", "NPROCS", "TASKS_PER_NODE", "TASK_PID", "GTIDS")
)
_OTHERS = frozenset({"HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "TORCHELASTIC_USE_AGENT_STORE"})

#: What a worker of another job has from that job's launcher, besides :data:`OWNED`. By hand it is a user's own.
_OF_OUTER_JOB = frozenset(map(config.variable, ("weight", "worker_group", "worker_groups"))) | {
    "MASTER_ADDR", "MASTER_PORT",
    "DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT",
}  # fmt: skip


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what others say of this process: to processes of a job it would be wrong."""
    is_ranked, is_worker = not _FOREIGN_RANKS.isdisjoint(environ), config.variable("role") in environ
    return {
        name: value
        for name, value in environ.items()
        if not (name in OWNED or name in _OTHERS)
        and not (is_ranked and (name.startswith(_FOREIGN_PREFIXES) or name in _FOREIGN_NAMES))
        and not (is_worker and name in _OF_OUTER_JOB)
    }


def owned(spec: JobSpec) -> frozenset[str]:
    """Return the variables that only the launcher of a job sets."""
    return OWNED | {AUTOLOAD} if spec.ddp else OWNED


def identity(spec: JobSpec, role: str, rank: int, local_rank: int) -> dict[str, Value]:
    """Return the identity of a process and, in a job with a scheduler, how it joins.

    A job without servers has no scheduler either; its workers are not part of a paceline job.
    """
    fields: dict[str, Value] = {"role": role, "job_id": spec.job_id, "num_workers": str(spec.num_workers)}
    fields |= {"rank": str(rank), "local_rank": str(local_rank)}
    fields |= {"restart": Late.RESTART} if spec.max_restarts else {}
    if role == "scheduler" and spec.max_restarts and spec.settings.get("dashboard"):
        fields["page_token"] = Late.PAGE_TOKEN
    if spec.servers:
        fields["num_servers"] = str(spec.servers)
        fields["scheduler"] = Late.BIND if role == "scheduler" else Late.SCHEDULER
        if not spec.insecure:
            fields["job_key"] = Late.JOB_KEY
    env = {config.variable(name): value for name, value in fields.items()}
    pipes: dict[str, Value] = {"PACELINE_READY_FD": Late.READY_FD, "PACELINE_ENDED_FD": Late.ENDED_FD}
    return env | pipes if role == "scheduler" else env


def settings(spec: JobSpec) -> dict[str, Value]:
    """Return the settings that the user gave for the whole job."""
    return {config.variable(name): text for name, text in spec.settings.items()}


def of_host(interface: str) -> dict[str, Value]:
    """Return the network interface of a process, if one is chosen."""
    return {config.variable("interface"): interface} if interface else {}


def of_group(spec: JobSpec, group: WorkerGroup, host_weight: float) -> dict[str, Value]:
    """Return workers' variables about their group: its name, their speed, and who steps together in ``dist_gsync``."""
    weight = host_weight if group.weight is None else group.weight
    env: dict[str, Value] = {} if weight == 1 else {config.variable("weight"): f"{weight:g}"}
    if spec.groups:
        env[config.variable("worker_group")] = group.name
        env[config.variable("worker_groups")] = ranks_by_group(spec)
    return env


def ranks_by_group(spec: JobSpec) -> str:
    """Return the ranks of the worker groups as a groups file in one line."""
    ranks = iter(range(spec.num_workers))
    return groups_line(itertools.islice(ranks, group.count) for group in spec.groups)


def torchrun(spec: JobSpec, rank: int, place: Placement, nodes: Sequence[str]) -> dict[str, Value]:
    """Return the variables of ``torch.distributed.init_process_group``, except the address of its master.

    With ``ddp`` there are the others of torchrun too, and the one that paceline's backend reads. ``nodes`` are the
    hosts that have workers, in the order of their ranks.
    """
    size = str(spec.num_workers)
    env: dict[str, Value] = {"RANK": str(rank), "WORLD_SIZE": size}
    env |= {"LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.local_size)}
    if not spec.ddp:
        return env
    env |= {AUTOLOAD: "1"}
    env |= {"PACELINE_DDP": spec.shares if spec.shares == "measured" else "1", "TORCHELASTIC_RUN_ID": spec.job_id}
    env |= {"TORCHELASTIC_RESTART_COUNT": Late.RESTART if spec.max_restarts else "0"}
    env |= {"TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts)}
    env |= {"GROUP_RANK": str(nodes.index(place.host.name)), "GROUP_WORLD_SIZE": str(len(nodes))}
    return env | {"ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default"}


def master(host: str, environ: Mapping[str, str]) -> dict[str, Value]:
    """Return where worker 0 opens the store of ``torch.distributed``; its host is learnt late if it is "".

    The backend picks a port that is free at that moment, but worker 0 binds it only later: another program can take it
    in between. To use a certain port, set MASTER_PORT in the launcher's environment or with ``--env``.
    """
    return {"MASTER_ADDR": host or Late.MASTER_ADDR, "MASTER_PORT": environ.get("MASTER_PORT") or Late.MASTER_PORT}


def mxnet(spec: JobSpec) -> dict[str, Value]:
    """Return the same values under the names that MXNet scripts read."""
    if not spec.servers:
        return {}
    return {
        "DMLC_ROLE": "worker",
        "DMLC_NUM_WORKER": str(spec.num_workers),
        "DMLC_NUM_SERVER": str(spec.servers),
        "DMLC_PS_ROOT_URI": Late.SCHEDULER_HOST,
        "DMLC_PS_ROOT_PORT": Late.SCHEDULER_PORT,
    }


def unbuffered(environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the setting that makes Python print at once: else a killed process loses the last lines in its buffer."""
    return {"PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED") or "1"}
