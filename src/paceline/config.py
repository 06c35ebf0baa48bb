"""Settings of one process, resolved once: argument, then environment, then file, then default.

Every setting has one name: field ``num_workers`` is argument ``num_workers=``, variable ``PACELINE_NUM_WORKERS`` and
key ``num_workers`` of the TOML file that ``PACELINE_CONFIG`` names. The ``DMLC_*`` and ``MXNET_*`` names of MXNet
scripts are accepted as aliases, weaker than our own name; ``DMLC_*`` only where ``DMLC_ROLE`` is set.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError
from paceline.naming import nearest

PREFIX = "PACELINE_"

#: Variables with our prefix that are no settings.
_OTHER_VARIABLES = (
    "PACELINE_CONFIG",
    "PACELINE_READY_FD",
    "PACELINE_ENDED_FD",
    "PACELINE_UPDATE_ON_KVSTORE",
    "PACELINE_SPEC",
    "PACELINE_DDP",
)

#: Values of ``placement``, ``on_worker_death`` and ``log_level``.
PLACEMENTS = ("balanced", "layered", "hash")
ON_WORKER_DEATH = ("", "stop", "continue")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

#: Heartbeats of all members that a scheduler gets in a second, and of each member in ``heartbeat_timeout_s`` at least.
BEATS_PER_S, BEATS_PER_TIMEOUT = 80, 4

_IMPORT_PATH = re.compile(r"\s*([\w.]+:[\w.]+\s*)?")
#: Most processes of a role, largest other integer, and largest speed: messages take no more.
_MOST_PROCESSES, _MOST, MOST_SPEED, _MOST_PORT = 1_000_000, 2**48, 1e15, 65535
#: Most characters of names: files are named after a job, and a name in DNS has at most 253.
_LONGEST = {"job_id": 200, "host": 253}
#: Words of settings that take no others.
_CHOICES = {
    "role": ("worker", "server", "scheduler"), "placement": PLACEMENTS, "log_level": LOG_LEVELS,
    "on_worker_death": ON_WORKER_DEATH,
}  # fmt: skip
#: Least values, and what is right.
_LEAST = {
    "num_workers": (1, "it must be at least 1"),
    "num_servers": (1, "it must be at least 1"),
    "bigarray_bound": (1, "it must be at least 1"),
    "rank": (-1, "it counts from 0, and -1 lets the scheduler choose"),
    "local_rank": (-1, "it counts from 0, and -1 lets the scheduler choose"),
    "server_threads": (0, "it must be at least 1, or 0 for a share of the cores"),
    "staleness": (0, "it is a number of rounds, 0 or more"),
    "regroup_rounds": (0, "it is a number of rounds, 0 or more"),
    "incarnation": (0, "it is a number of processes, 0 or more"),
    "age": (0, "it is a number of missed updates, 0 or more"),
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True)
class Settings:
    """Settings of a process. Times are seconds, sizes are bytes unless the name says otherwise."""

    role: str = "worker"
    """``worker``, ``server`` or ``scheduler``."""
    job_id: str = "job"
    """Names the job in messages and logs."""
    job_key: str = ""
    """The job's secret (32 random bytes as 40 characters of Z85). Empty only with ``insecure``."""
    insecure: bool = False
    """No authentication and no encryption at all: for a network that nobody else can reach."""
    encrypt: bool = True
    """Encrypt tensors as well as control messages. Without it both sides still prove that they hold the job key."""
    scheduler: str = ""
    """Address of the scheduler, ``tcp://host:port``. Empty: this process is not part of a job."""
    num_workers: int = 1
    """Workers of the job."""
    num_servers: int = 1
    """Servers of the job."""
    rank: int = -1
    """Launch index within the role; -1 lets the scheduler choose."""
    local_rank: int = 0
    """Index among the workers of this host."""
    host: str = ""
    """Address that this process binds and advertises. Empty: the one from which it reaches the scheduler."""
    interface: str = ""
    """Network interface whose address to use: exact name, address, or network (``10.0.0.0/8``)."""
    ports: str = ""
    """Range of TCP ports at which processes listen, ``FIRST-LAST``: those that a firewall lets through. Empty: any."""
    staleness: int | None = None
    """Default bound of ``dist_ssync`` and ``dist_gsync``, in rounds."""
    groups: str = ""
    """Path of the groups file of ``dist_gsync``: a group per line, members by rank, host or ``host:slot``, and
    hosts by address or as ``-H`` of ``paceline launch`` names them. Or its text with ``;`` after each group (``0 1;
    2;``). Or ``auto`` (``paceline launch --groups auto``)."""
    regroup_rounds: int = 0
    """Rounds between two checks whether the ``groups``, given by rank, still fit the workers' speeds; if not, they
    change (``dist_gsync`` without a bound). So does the choice of ``dist_auto``. 0: they stay. It turns their
    ``local_merge`` off. ``paceline launch --groups auto`` sets it to 5."""
    worker_group: str = ""
    """Name of the worker group that this worker belongs to, of jobs that have groups."""
    worker_groups: str = ""
    """Ranks of all worker groups (``0 1; 2;``): groups of ``dist_gsync`` if ``groups`` is empty."""
    weight: float = 1.0
    """Speed of this worker relative to the others, as the user says."""
    restart: int = 0
    """How often the launcher has started the job again after a failure."""
    incarnation: int = 0
    """How many processes have had this worker's rank before in the running job (``paceline launch --replace``)."""
    verbose: int = 0
    """Verbosity of the roles' logs: 1 connections, 2 every message as well."""
    weighting: str = ""
    """Default weighting of stale updates: ``none``, ``inverse``, ``normalised`` or a registered one."""
    lr_scale: str = ""
    """Unit of the learning rate: an ``update`` (the default), or a ``sample``: an update then steps by its part of
    one batch of every worker."""
    age: int | None = None
    """Missed updates beyond which ``dist_async``, ``dist_ssync`` and ``dist_ksync`` drop a push; None: no limit."""
    bigarray_bound: int = 1_000_000
    """Keys of up to this many elements stay whole; larger ones may be split over servers."""
    placement: str = "balanced"
    """Method that assigns buckets to servers: ``balanced``, ``layered`` or ``hash``."""
    server_speeds: str = ""
    """Relative speeds of the servers for placement, comma separated; or ``measured``, at each server's start.
    Empty means ``measured`` with ``layered`` placement, else equal."""
    shared_memory: bool = True
    """Exchange tensors through shared memory with servers of the same host."""
    local_merge: bool = True
    """Sum the pushes of a host's workers there, so that they cross the network once. The same on all members."""
    unix_sockets: bool = True
    """Use unix sockets instead of TCP to servers of the same host."""
    server_threads: int = 0
    """Threads of a server for sums and updates; 0: its share of the host's cores, at most 8."""
    allow: str = ""
    """Import paths (``pkg.mod:Name``, comma separated) of optimizers, codecs and the like that a server imports."""
    start_timeout_s: float = 60.0
    """How long to wait until all members have joined. Of a process that the launcher sees start on a busy host, the CPU
    time that it gets counts, not the time that passes."""
    timeout_s: float = 300.0
    """How long any request may take after the processes that it waits for have got on last: taken a step, or sent or
    received a part of a tensor."""
    heartbeat_interval_s: float = 0.5
    """Interval of the heartbeats that a member sends to the scheduler. It is longer in jobs of more than 40 processes:
    a second in jobs of 80 or more (:attr:`beat_interval_s`)."""
    heartbeat_timeout_s: float = 4.0
    """Silence after which a member is named in the log and in ``paceline status``."""
    stall_timeout_s: float = 30.0
    """Silence after which a member counts as dead: for nearly as long a network may fail, a process may be stopped, a
    call may hold Python's lock. A process that has ended is known at once."""
    disconnect_grace_s: float = 5.0
    """How long a peer whose connection closed has to come back where it is unknown whether its process runs; if it
    runs, ``stall_timeout_s`` counts."""
    on_worker_death: str = ""
    """``stop``: the death of a worker ends the job; ``continue``: the others go on. Empty: ``stop`` if a store of the
    job is ``dist_sync``, else ``continue``."""
    profile: str = ""
    """Path of the speeds file that worker 0 writes; then the job ends (``paceline profile``). ``-``: it prints them
    with all steps instead (``paceline up``). Empty: no such end."""
    profile_rounds: int = 20
    """Rounds that ``paceline profile`` measures."""
    profile_steps: str = ""
    """Path of a file of all measured steps, which worker 0 writes too (``paceline launch --groups auto``)."""
    choice: str = ""
    """The choice of ``dist_auto`` (JSON), by ``paceline launch --groups auto``."""
    measured: str = ""
    """The measurements behind ``choice`` (JSON). With ``regroup_rounds`` the scheduler repeats the choice of
    ``dist_auto`` by them and the speeds of now."""
    metrics: str = ""
    """Where the scheduler serves the figures of the job to Prometheus: ``[HOST:]PORT``; by default on loopback only, 0
    takes a free port. Empty: nowhere."""
    report_to: str = ""
    """Tools to which the scheduler gives the figures of the job: ``NAME`` or ``NAME:TARGET``, comma separated
    (``paceline launch --report-to``)."""
    recorder: bool = True
    """Keep the last events of each process in memory, for ``paceline story`` and ``paceline trace``."""
    dashboard: str = ""
    """Port of loopback at which the scheduler serves the page of the job, under an address with a secret that its log
    names; 0 takes a free one. Empty: no page."""
    page_token: str = ""
    """The secret in that address, by a launcher that starts the job again; empty: a new one."""
    report: str = ""
    """Path of the file to which the scheduler writes the page at the end of the job. Empty: no report."""
    check_rules: bool = False
    """Check the rule of every slot after each event, on servers: for tests and bug reports, as it costs time."""
    log_level: str = "WARNING"
    """Of the roles' processes: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``."""

    def merges_locally(self, merge: str) -> bool:
        """Whether the pushes of a host's workers are summed there; not where workers change groups."""
        return self.local_merge and not (self.regroup_rounds and merge == "groups")

    @property
    def beat_interval_s(self) -> float:
        """Interval of heartbeats in a job of so many members, all of which know it.

        The scheduler's work grows with the heartbeats of all. Each member sends several in ``heartbeat_timeout_s``
        anyway, so a late one is no silence.
        """
        of_all_s = (self.num_workers + self.num_servers) / BEATS_PER_S
        return max(self.heartbeat_interval_s, min(of_all_s, self.heartbeat_timeout_s / BEATS_PER_TIMEOUT))

    @property
    def measures_servers(self) -> bool:
        """Whether servers measure their speeds."""
        return self.server_speeds == "measured" or (self.placement == "layered" and not self.server_speeds)

    def replace(self, **changes: Any) -> Settings:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


#: Names that MXNet scripts set. Weaker than ``PACELINE_*``; ``DMLC_*`` count only together with ``DMLC_ROLE``.
ALIASES: Mapping[str, str] = {
    "DMLC_ROLE": "role",
    "DMLC_NUM_WORKER": "num_workers",
    "DMLC_NUM_SERVER": "num_servers",
    "DMLC_NODE_HOST": "host",
    "DMLC_INTERFACE": "interface",
    "MXNET_KVSTORE_BIGARRAY_BOUND": "bigarray_bound",
    "PS_HEARTBEAT_INTERVAL": "heartbeat_interval_s",
    "PS_HEARTBEAT_TIMEOUT": "heartbeat_timeout_s",
    "PS_VERBOSE": "verbose",
}

_TYPES = {field.name: str(field.type) for field in dataclasses.fields(Settings)}


def variable(field: str) -> str:
    """Return the name of the environment variable of a field of :class:`Settings`."""
    return PREFIX + field.upper()


def parse(field: str, text: str, source: str) -> Any:
    """Convert the text of one setting to the type of its field.

    Raises:
        ConfigError: the text does not fit; the message names its source.
    """
    kind = _TYPES[field]
    try:
        if kind == "bool":
            word = text.strip().lower()
            if word in _TRUE or word in _FALSE:
                return word in _TRUE
            raise ValueError(text)
        if kind.startswith("int"):
            return int(text) if text.strip() else None if "None" in kind else int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        wanted = {"bool": "0 or 1", "float": "a number"}.get(kind, "an integer")
        raise ConfigError(f"{source}={text!r:.100} is not {wanted}") from None
    return text


def _from_file(path: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # missing, not UTF-8, not TOML, lists in lists without end
        raise ConfigError(f"PACELINE_CONFIG={path}: {error}") from error
    unknown = sorted(set(table) - set(_TYPES))
    if unknown:
        raise ConfigError(f"PACELINE_CONFIG={path}: unknown settings {', '.join(unknown)}")
    return {name: parse(name, str(value), f"{path}: {name}") for name, value in table.items()}


def _scheduler_alias(env: Mapping[str, str]) -> dict[str, Any]:
    host, port = env.get("DMLC_PS_ROOT_URI", ""), env.get("DMLC_PS_ROOT_PORT", "")
    host = f"[{host}]" if ":" in host else host
    return {"scheduler": f"tcp://{host}:{port}"} if host and port else {}


def from_environment(env: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """Resolve the settings of this process.

    Args:
        env: the environment; ``os.environ`` by default.
        **arguments: fields given explicitly; ``None`` means not given.

    Raises:
        ConfigError: a value cannot be read, or the combination makes no sense.
    """
    env = os.environ if env is None else env
    check_names(env)
    values: dict[str, Any] = _from_file(env[variable("config")]) if env.get(variable("config")) else {}
    # Other systems set DMLC_* too (XGBoost's tracker): these names count only together with a role.
    known = {name: text for name, text in env.items() if env.get("DMLC_ROLE") or not name.startswith("DMLC_")}
    values |= _scheduler_alias(known)
    values |= {name: parse(name, known[alias], alias) for alias, name in ALIASES.items() if known.get(alias)}
    values |= {
        name: parse(name, env[variable(name)], variable(name)) for name in _TYPES if env.get(variable(name), "") != ""
    }
    values |= {name: value for name, value in arguments.items() if value is not None}
    settings = Settings(**values)
    check(settings)
    warn_of_unused(settings)
    return settings


def check_names(env: Mapping[str, str]) -> None:
    """Refuse variables that look like a misspelt setting, and warn of others with our prefix that mean nothing to us.

    Raises:
        ConfigError: with the name that was probably meant.
    """
    known = {*map(variable, _TYPES), *_OTHER_VARIABLES}
    for name in sorted(name for name in env if name.startswith(PREFIX) and name not in known):
        meant = nearest(name.removeprefix(PREFIX), (one.removeprefix(PREFIX) for one in known))
        if meant:
            raise ConfigError(f"the variable {name} is unknown; did you mean {PREFIX}{meant}?")
        if not name.startswith(("PACELINE_TEST", "PACELINE_FUZZ")):
            warnings.warn(f"the variable {name} is unknown and changes nothing", stacklevel=3)


def warn_of_unused(settings: Settings) -> None:
    """Warn of settings that change nothing because of others. The scheduler does, so there is one line in a job."""
    if settings.role != "scheduler":
        return
    for name, why, is_unused in (
        ("interface", "host is set too, and is used", settings.interface and settings.host),
        ("server_speeds", "placement is hash", settings.server_speeds and settings.placement == "hash"),
    ):
        if is_unused:
            warnings.warn(f"{variable(name)} is set and changes nothing: {why}", stacklevel=3)


def check(settings: Settings) -> None:
    """Check that settings can work.

    Raises:
        ConfigError: a setting cannot work; the message names it and a right value.
    """
    for name, words in _CHOICES.items():
        given = getattr(settings, name)
        if given not in words and not (name == "log_level" and given.upper() in words):
            *others, last = filter(None, words)
            raise ConfigError(f"{name} {given!r} is unknown; it is {', '.join(others)} or {last}")
    _check_scheduler(settings)
    port_range(settings.ports)
    for name, longest in _LONGEST.items():
        text = getattr(settings, name)
        if not text.isprintable() or len(text) > longest:
            raise ConfigError(f"{name} {text!r:.100} is not a name of at most {longest} printable characters")
    for name, (least, what) in _LEAST.items():
        if (getattr(settings, name) or 0) < least:
            raise ConfigError(f"{name} is {getattr(settings, name)}; {what}")
    for name in (name for name, kind in _TYPES.items() if kind.startswith("int")):
        value, is_count = getattr(settings, name), name in ("num_workers", "num_servers", "rank", "local_rank")
        most = _MOST_PROCESSES if is_count else _MOST
        if value is not None and value > most:
            raise ConfigError(f"{name} is {value}; it is at most {most:,}")
    for path in settings.allow.split(",") if settings.allow else ():
        if not _IMPORT_PATH.fullmatch(path):
            raise ConfigError(f"allow {path!r} is not pkg.mod:Name, as in mylib.optim:Lion")
    for name in (name for name in _TYPES if name.endswith("_s")):
        if not 0 < getattr(settings, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(settings, name)}; every wait needs a deadline above 0 seconds")
    if settings.heartbeat_timeout_s <= settings.heartbeat_interval_s:
        raise ConfigError("heartbeat_timeout_s must be longer than heartbeat_interval_s")
    _check_speeds(settings)
    if settings.metrics:
        metrics_address(settings.metrics)
    if settings.dashboard and not _is_port(settings.dashboard):
        raise ConfigError(
            f"dashboard {settings.dashboard!r} is not a port, as in 8080, or 0 for any; it is on loopback only"
        )
    if settings.stall_timeout_s < settings.heartbeat_timeout_s:
        raise ConfigError(
            f"stall_timeout_s is {settings.stall_timeout_s:g}; it must be at least heartbeat_timeout_s "
            f"({settings.heartbeat_timeout_s:g}): raise {variable('stall_timeout_s')} too"
        )
    if not 0 < settings.weight <= MOST_SPEED:
        raise ConfigError(f"weight is {settings.weight}; it is a speed, above 0")
    if settings.scheduler and not settings.insecure and not settings.job_key:
        raise ConfigError(
            "this process has no job key: set PACELINE_JOB_KEY to the key of the job (paceline launch does), "
            "or PACELINE_INSECURE=1 for all processes on a network that nobody else can reach"
        )


def port_range(text: str) -> range:
    """Return the ports of ``FIRST-LAST``; of an empty text 0, for which the kernel chooses one.

    Raises:
        ConfigError: it is no such range.
    """
    first, _, last = text.partition("-")
    if text and not (_is_port(first) and _is_port(last) and 0 < int(first) <= int(last)):
        raise ConfigError(f"ports {text!r:.100} is not a range of ports, as in 20000-20099")
    return range(int(first), int(last) + 1) if text else range(1)


def metrics_address(where: str) -> tuple[str, int]:
    """Return host and port of ``[HOST:]PORT``; without a host it is loopback.

    Raises:
        ConfigError: it is no such address.
    """
    host, _, port = where.rpartition(":")
    if not _is_port(port):
        raise ConfigError(f"metrics {where!r} is not [HOST:]PORT, as in 9464 or 0.0.0.0:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= _MOST_PORT


def _check_scheduler(settings: Settings) -> None:
    if not settings.scheduler:
        return
    try:
        address = urlsplit(settings.scheduler)
        is_right = address.scheme == "tcp" and bool(address.hostname) and address.port is not None and not address.path
    except ValueError:  # the port is no number, or does not exist
        is_right = False
    if not is_right:
        raise ConfigError(f"scheduler is {settings.scheduler!r}; it is an address of the form tcp://HOST:PORT")


def _check_speeds(settings: Settings) -> None:
    if settings.server_speeds == "measured":
        return
    try:
        speeds = [float(part) for part in settings.server_speeds.split(",") if part]
    except ValueError:
        speeds = [0.0]
    is_wrong_count = bool(settings.scheduler) and len(speeds) not in (0, settings.num_servers)
    if is_wrong_count or not all(0 < speed <= MOST_SPEED for speed in speeds):
        raise ConfigError(
            f"server_speeds {settings.server_speeds!r} is not a list of one positive number for each of "
            f"{settings.num_servers} servers, as in 1,2.5; nor measured"
        )
