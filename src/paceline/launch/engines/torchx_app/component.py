"""The component ``paceline.job`` of TorchX. The only module that imports torchx; TorchX finds it by its entry point.

TorchX calls the function with values from its command line, so the types are those that it understands.
"""

import json
from typing import Dict, List, NamedTuple, Optional  # noqa: UP035 - TorchX knows these names only

from torchx import specs

from paceline.launch.engines.torchx_app.start import FILLED_IN, START, default_key_file
from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import JobPart, Late, job_parts
from paceline.launch.planner import Machine, make_plan
from paceline.launch.worker_groups import WorkerGroup, amount, parse_group

_MB = 1024 * 1024


class _Shared(NamedTuple):
    image: str
    python: str
    port: int
    key_file: str


def job(
    *command: str,
    workers: int = 0,
    servers: int = -1,
    group: str = "",
    name: str = "paceline",
    image: str = "",
    python: str = "python3",
    port: int = 9091,
    key_file: str = "",
    insecure: bool = False,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    cpu: int = 1,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803 - TorchX's own name of it
    h: Optional[str] = None,  # noqa: UP045
    max_retries: int = 0,
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """A paceline job: one scheduler, servers and workers that each run the command.

    The roles find each other by the host of the first role's replica 0, which TorchX's schedulers tell all replicas.
    The job's key is derived from a key file and the application's id, so it is no part of the AppDef. RANK, WORLD_SIZE
    and MASTER_ADDR are not set, because TorchX does not say where worker 0 runs.

    Args:
        command: what every worker runs; follows ``--``.
        workers: how many; leave it out with groups.
        servers: how many; -1: as many as workers.
        group: worker groups, as ``--group`` of paceline launch has them; several are separated by semicolons.
        name: name of the application.
        image: what TorchX's scheduler starts the processes from; ignored by local_cwd.
        python: interpreter of scheduler, servers and start-up in the image.
        port: the scheduler's port, on its host.
        key_file: file with a secret (mode 0600) that all replicas can read; default: ~/.paceline/torchx.key, made once.
        insecure: no key at all.
        env: variables of all processes, as in A=1,B=2.
        cpu: CPUs of a replica.
        gpu: GPUs of a worker.
        memMB: memory of a replica in MB.
        h: named resource of the workers, instead of cpu, gpu and memMB.
        max_retries: how often a scheduler may start a failed role again.
        mounts: mounts of TorchX, as in type=bind,src=/host,dst=/job.
    """
    texts = [text for text in group.split(";") if text.strip()]
    spec = JobSpec(
        command=command,
        num_workers=workers,
        num_servers=None if servers < 0 else servers,
        job_id=name,
        groups=tuple(parse_group(text) for text in texts),
        env=env or {},
        settings={"insecure": "1"} if insecure else {},
        torchrun_env=False,
    )
    plan = make_plan(spec, Machine(python, {}, {}), alone=True)
    key = "" if insecure else key_file or default_key_file()
    small, shared = specs.resource(cpu=cpu, gpu=0, memMB=memMB), _Shared(image, python, port, key)
    roles = []
    for part in job_parts(spec, plan):
        resource = small if part.group is None else _resource(part.group, cpu, gpu, memMB, h)
        role = _role(part, resource, shared)
        role.max_retries = max_retries
        role.mounts = list(specs.parse_mounts(mounts)) if mounts else []
        roles.append(role)
    return specs.AppDef(name=name, roles=roles)


def _role(part: JobPart, resource: specs.Resource, shared: _Shared) -> specs.Role:
    first = part.processes[0]
    late = {key: value.name for key, value in first.env.items() if isinstance(value, Late) and value in FILLED_IN}
    plain = {key: _literal(value) for key, value in first.env.items() if isinstance(value, str)}
    start = {"late": late, "first_rank": first.rank, "port": shared.port, "key_file": shared.key_file}
    return specs.Role(
        name=part.name,
        image=shared.image,
        entrypoint=shared.python,
        args=[
            "-P",
            "-m",
            START,
            _literal(json.dumps(start)),
            specs.macros.app_id,
            specs.macros.replica_id,
            specs.macros.rank0_env,
            *map(_literal, first.argv),
        ],
        env=plain,
        num_replicas=len(part.processes),
        resource=resource,
        port_map={"scheduler": shared.port} if first.role == "scheduler" else {},
    )


def _literal(text: str) -> str:
    """Return a text in which TorchX fills in nothing: it takes ``$`` for the start of a macro."""
    return text.replace("$", "$$")


def _resource(group: WorkerGroup, cpu: int, gpu: int, memory_mb: int, named: Optional[str]) -> specs.Resource:  # noqa: UP045
    if named is not None:
        return specs.resource(h=named)
    given = group.resources
    if "memory" in given:
        memory_mb = int(amount("memory", given["memory"], None)) // _MB
    return specs.resource(cpu=int(given.get("cpus", cpu)), gpu=int(given.get("gpus", gpu)), memMB=memory_mb)
