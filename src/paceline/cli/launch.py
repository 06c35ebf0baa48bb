"""``paceline launch``."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import FrameType

from paceline import config
from paceline.cli.job_file import fill_in
from paceline.cli.launch_options import ADVICE, DESCRIPTION, EPILOG, OF_SERVERS, OPTIONS, USAGE
from paceline.cli.options import Parser, UsageError, read_hosts, split_command, usage_errors
from paceline.consistency import groups_line, parse_groups, weighting_names
from paceline.host.interfaces import address_of
from paceline.launch import (
    Graces,
    Host,
    Job,
    JobSpec,
    Machine,
    backend,
    check_unread,
    parse_group,
    with_default_interface,
)
from paceline.launch.host_list import LOCALHOST
from paceline.launch.interpreter import other_python
from paceline.launch.preflight import make_folder, read_text, variables_read
from paceline.launch.process_environment import AUTOLOAD
from paceline.naming import listed, suggestion
from paceline.observe.table import plural

#: Launchers in whose hosts ``name:4`` means four slots, as MPICH has it, and not port 4.
_NUMBER_IS_SLOTS = frozenset({"mpi"})
#: Launchers whose jobs ``paceline jobs`` knows.
_SUPERVISED = frozenset({"local", "ssh"})
#: Launchers whose hosts get a part of this shell's variables.
_FORWARDS_SOME = frozenset({"ssh", "mpi", "ray", "yarn"})
#: Launchers whose engine chooses the hosts.
_CHOOSES_HOSTS = frozenset({"k8s", "ray", "sge", "slurm", "yarn"})


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline launch`` and return the job's exit code."""
    ours, command = split_command(words, OPTIONS)
    options = Parser(name, OPTIONS, USAGE, DESCRIPTION, EPILOG, ADVICE).parse(ours)
    if options.config is not None:
        command = fill_in(options, command, OPTIONS)
    _find_groups(options, command)
    with usage_errors():
        options.group = [parse_group(one) if isinstance(one, str) else one for one in options.group]
        options.launcher = options.launcher or _usual_launcher(options)
        chosen = backend(options.launcher)
        spec = job_spec(options, command)
        request = chosen.plan(spec, Machine.here())
        check_unread(options.launcher, spec)
    _check_variables(spec)
    if options.dry_run:  # needs no engine
        print(chosen.render(request), end="")
        return 0
    chosen.check(request)
    if options.log_dir:
        make_folder(options.log_dir, "the folder of --log-dir")
    _say_how_to_look(spec, options)
    _say_other_python(spec, options)
    _say_kept_back(spec, options)
    if options.groups == "auto":
        from paceline.cli.auto_groups import with_measured_groups

        measured = with_measured_groups(spec, lambda one: _wait(chosen.submit(chosen.plan(one, Machine.here()))))
        if isinstance(measured, int):
            return measured
        request = chosen.plan(measured, Machine.here())
    return _wait(chosen.submit(request))


def _usual_launcher(options: argparse.Namespace) -> str:
    """Return the launcher of a job that names none: ssh where it names other hosts."""
    of_groups = {host.name for group in options.group for host in group.hosts}
    return "local" if options.hosts is None and of_groups <= {LOCALHOST, "localhost"} else "ssh"


def _say_how_to_look(spec: JobSpec, options: argparse.Namespace) -> None:
    """Say on a terminal what starts now, and how to look at it: the script's own first line may take a while."""
    if spec.quiet or not sys.stderr.isatty():
        return
    where = listed((host.name for host in spec.hosts), 4)
    what = f"{plural(spec.num_workers, 'worker', 'workers')} and {plural(spec.servers, 'server', 'servers')}"
    print(f"paceline: job {spec.job_id} starts {what} on {where}", file=sys.stderr)
    if spec.servers and options.launcher in _SUPERVISED:
        print(f"paceline: look at it with: paceline top {spec.job_id}", file=sys.stderr)
    if options.groups == "auto":
        print("paceline: first a short job measures the workers (--groups auto)", file=sys.stderr)
    if spec.sync:
        print(f"paceline: first this directory is copied to {spec.directory} there", file=sys.stderr)
    sys.stderr.flush()


def _say_other_python(spec: JobSpec, options: argparse.Namespace) -> None:
    """Say which Python runs the script where the shell would start another one, and what ``--ddp`` changes here."""
    others = other_python(spec.command, os.environ)
    if others and options.launcher not in _CHOOSES_HOSTS:
        which = f"{spec.command[0]} of the command is {sys.executable}, which has this paceline, and not {others}"
        print(f"paceline: {which} of the PATH; give a path to choose another one", file=sys.stderr, flush=True)
    if spec.ddp and os.environ.get(AUTOLOAD, "1") != "1":
        set_to = f"{AUTOLOAD}={os.environ[AUTOLOAD]}"
        print(f"paceline: {set_to} does not count for the workers: --ddp needs it", file=sys.stderr, flush=True)


def _say_kept_back(spec: JobSpec, options: argparse.Namespace) -> None:
    """Say which variables of this shell the command reads, and workers on other hosts do not get."""
    if options.launcher not in _FORWARDS_SOME:
        return
    from paceline.launch.remote import kept_back  # jobs of this machine do not need it

    given = {*spec.env, *spec.env_worker, *(name for group in spec.groups for name in group.env)}
    absent = sorted((kept_back(os.environ) - given) & variables_read(spec.command))
    if absent:
        more = " ".join(f"--env {name}" for name in absent)
        known = f"the command reads {listed(absent)}, which workers on other hosts do not get from this shell"
        print(f"paceline: {known}; to pass on: {more}", file=sys.stderr, flush=True)


def _wait(job: Job) -> int:
    """Wait for a job; cancel it when a signal ends this process. What we supervise ourselves handles signals itself."""
    try:
        with sigterm_raises():
            return job.wait()
    except KeyboardInterrupt:
        job.cancel()
        return 130  # 128 + SIGINT
    except TerminatedError as error:
        job.cancel()
        return 128 + error.signum


class TerminatedError(Exception):
    """SIGTERM came, or SIGQUIT, or SIGHUP: its terminal was closed."""

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let signals that end a job raise :class:`TerminatedError` in the block, if they are not ignored (``nohup``).

    Of SIGINT Python makes a ``KeyboardInterrupt``.
    """

    def terminated(signum: int, frame: FrameType | None) -> None:
        raise TerminatedError(signum)

    ending = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    caught = [one for one in ending if signal.getsignal(one) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, terminated) for signum in caught}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def job_spec(options: argparse.Namespace, command: Sequence[str]) -> JobSpec:
    """Turn parsed options into a job.

    Raises:
        UsageError: the number of workers is missing, or a variable has no value.
        ValueError: see :class:`~paceline.launch.JobSpec`.
        paceline.errors.PacelineError: the groups file cannot be read, or a setting cannot work.
    """
    groups = tuple(options.group)
    number_is_slots = options.launcher in _NUMBER_IS_SLOTS
    hosts = () if options.hosts is None else read_hosts(options.hosts, number_is_slots=number_is_slots)
    if options.nproc_per_node is not None:
        hosts = _with_slots(options, hosts or JobSpec.hosts)
    if options.num_workers is None and not groups:
        raise UsageError("the number of workers is missing; give -n, as in: -n 2 -- python train.py")
    _refuse_unused(options)
    _check_words(options)
    if options.sync_dst_dir is not None and not os.path.isabs(options.sync_dst_dir):
        raise UsageError(f"--sync-dst-dir {options.sync_dst_dir!r} is not an absolute path, such as /tmp/train")
    named = {host.name: host for host in hosts}
    groups = tuple(replace(one, hosts=tuple(named.get(host.name, host) for host in one.hosts)) for one in groups)
    anywhere = hosts or tuple(dict.fromkeys(host for group in groups for host in group.hosts)) or JobSpec.hosts
    if options.ddp and command and command[0].endswith(".py"):
        command = [sys.executable, *command]  # as torchrun has it
    return JobSpec(
        command=tuple(command),
        num_workers=0 if options.num_workers is None and groups else options.num_workers,
        num_servers=options.num_servers,
        job_id=secrets.token_hex(4),
        hosts=with_default_interface(anywhere, _interface(options)),
        groups=groups,
        env=_variables("--env", options.env),
        env_worker=_variables("--env-worker", options.env_worker),
        env_server=_variables("--env-server", options.env_server),
        settings=_settings(options),
        torchrun_env=not options.no_torchrun_env,
        ddp=options.ddp,
        shares=options.shares or "equal",
        graces=_graces(options),
        directory=options.sync_dst_dir or "",
        sync=options.sync_dst_dir is not None,
        log_dir=os.path.abspath(options.log_dir) if options.log_dir else "",
        quiet=options.quiet,
        max_restarts=options.max_restarts or 0,
        replace=options.replace or 0,
        options=dict(_pair("-o", text) for text in options.option),
    )


def _with_slots(options: argparse.Namespace, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Set the number of workers by that of each host, and give it to the hosts that have none of their own."""
    if options.num_workers is not None or options.group:
        raise UsageError("--nproc-per-node is the number of workers on each host; leave out -n and --group, or it")
    if options.launcher in _CHOOSES_HOSTS:
        raise UsageError(
            f"launcher {options.launcher!r} gets its hosts from its engine, so --nproc-per-node says no number of "
            "workers: give -n"
        )
    filled = tuple(replace(one, slots=options.nproc_per_node if one.slots is None else one.slots) for one in hosts)
    options.num_workers = sum(one.slots or 0 for one in filled)
    return filled


def _refuse_unused(options: argparse.Namespace) -> None:
    """Refuse options that change nothing in a job without servers. Other hosts have a deadline for their start."""
    given = {option.flags[-1]: getattr(options, option.name) for option in OPTIONS if option.flags[-1] in OF_SERVERS}
    if options.launcher != "local":
        given.pop("--start-timeout", None)
    unused = [flag for flag, value in given.items() if not (value is None or value is False or value == [])]
    if options.shares and not options.ddp:
        raise UsageError(
            "--shares is for DDP scripts, and needs --ddp; a script with a store takes "
            "paceline.data.SharedBatchSampler(..., shares='measured')"
        )
    if options.ddp and (options.num_servers == 0 or options.no_torchrun_env):
        which = "-s 0" if options.num_servers == 0 else "--no-torchrun-env"
        raise UsageError(f"--ddp needs a server, and the variables of torchrun; leave out {which}")
    if options.num_servers == 0 and unused:
        raise UsageError(f"{', '.join(unused)} changes nothing with -s 0: then there are workers only, and no stores")


def _check_words(options: argparse.Namespace) -> None:
    """Refuse what would fail, or change nothing, only after the start."""
    if options.hosts is not None and options.launcher in _CHOOSES_HOSTS:
        raise UsageError(f"launcher {options.launcher!r} gets its hosts from its engine, so -H changes nothing")
    if options.launcher == "local":
        _check_of_this_machine(options)
    if options.weighting and not options.allow and options.weighting not in (known := weighting_names()):
        raise UsageError(f"--weighting {options.weighting!r} is unknown{suggestion(options.weighting, known)}")


def _check_of_this_machine(options: argparse.Namespace) -> None:
    """Refuse values that the processes of this machine would refuse."""
    if options.interface:
        address_of(options.interface)
    if options.report:
        from paceline.observe import page  # takes msgspec

        page.check_report(options.report)
    for tool in () if options.allow else options.report_to:
        from paceline.observe import tracking

        tracking.make(tool.strip())


def _check_variables(spec: JobSpec) -> None:
    """Refuse settings among the variables that every process with them would refuse."""
    config.check_names(os.environ)
    for given in (spec.env, spec.env_worker, spec.env_server, *(group.env for group in spec.groups)):
        config.check_names(given)
        for name, value in given.items():
            field = name.removeprefix(config.PREFIX).lower()
            if name == config.variable(field) and field in config.Settings.__dataclass_fields__:
                config.parse(field, value, name)


def _interface(options: argparse.Namespace) -> str:
    """Return the job's network interface: an option, or a variable of the launcher's shell."""
    found = options.interface or os.environ.get(config.variable("interface")) or os.environ.get("DMLC_INTERFACE")
    return str(found or "")


def _variables(flag: str, texts: Iterable[str]) -> dict[str, str]:
    return dict(_variable(flag, text) for text in texts)


def _variable(flag: str, text: str) -> tuple[str, str]:
    if "=" not in text and text in os.environ:
        return text, os.environ[text]
    if "=" not in text:
        raise UsageError(f"{flag} {text!r} is not NAME=VALUE, and this shell has no variable of that name to pass on")
    return _pair(flag, text)


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or (flag == "-o" and not name):
        raise UsageError(f"{flag} {text!r} is not NAME=VALUE")
    return name, value


def _settings(options: argparse.Namespace) -> dict[str, str]:
    given = {
        "staleness": options.staleness,
        "groups": _groups_file(options),
        "weighting": options.weighting,
        "allow": ",".join(options.allow) or None,
        "report_to": ",".join(options.report_to) or None,
        "metrics": options.metrics,
        "dashboard": options.dashboard,
        "report": options.report,
        "on_worker_death": options.on_worker_death
        or ("stop" if options.ddp else "continue" if options.replace else None),
        "insecure": "1" if options.insecure else None,
        "timeout_s": options.timeout,
        "start_timeout_s": options.start_timeout,
        "verbose": os.environ.get(config.variable("verbose")) or os.environ.get("PS_VERBOSE") or None,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _find_groups(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Take the file ``groups`` of this directory for a command with the word ``dist_gsync``, and say so."""
    named = options.groups is not None or options.group or config.variable("groups") in os.environ
    is_grouped = any(word.rpartition("=")[2] == "dist_gsync" for word in command)
    if named or not is_grouped or not os.path.isfile("groups"):
        return
    options.groups = "groups"
    print(
        "paceline: dist_gsync gets its groups from the file groups of this directory, as in MXNet-G; --groups names "
        "another file, and --groups auto measures the workers",
        file=sys.stderr,
        flush=True,
    )


def _groups_file(options: argparse.Namespace) -> str | None:
    """Return the path of the groups file, or for other hosts, which may not have it, its text."""
    if options.groups is None:
        return None
    if options.groups == "auto":
        return "auto"
    more = "; paceline profile and paceline group write one, and --groups auto measures first"
    groups = parse_groups(read_text(options.groups, "the groups file", more))
    return os.path.abspath(str(options.groups)) if options.launcher == "local" else groups_line(groups)


def _graces(options: argparse.Namespace) -> Graces:
    graces = Graces()
    return Graces(
        start_s=_setting("start_timeout_s", options.start_timeout, graces.start_s),
        idle_s=_setting("timeout_s", options.timeout, graces.idle_s),
        survivors_s=graces.survivors_s if options.grace is None else options.grace,
        interrupt_s=graces.interrupt_s if options.grace is None else options.grace,
    )


def _setting(name: str, option: float | None, default: float) -> float:
    """Return a time that is an option of this command and a setting: from the command line, else its variable."""
    variable = config.variable(name)
    text = str(option) if option is not None else os.environ.get(variable)
    return float(config.parse(name, text, variable)) if text else default
