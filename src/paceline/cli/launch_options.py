"""The options and the help of ``paceline launch``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.cli.options import Option
from paceline.consistency import weighting_names
from paceline.launch import BACKENDS

#: By heading of the help.
_SECTIONS: Mapping[str, tuple[Option, ...]] = {
    "size": (
        Option(("-n", "-np", "--num-workers"), "number of workers", "N", int,
               elsewhere=("--np", "--num-proc", "--ntasks", "--worker", "--workers")),
        Option(("--nproc_per_node", "--nproc-per-node"),
               "number of workers on each host, instead of -n; a host's own slots= count first", "N", int, least=1),
        Option(("-s", "--num-servers"), "number of servers (default: as many as workers; 0: workers only)", "S", int,
               elsewhere=("--server", "--servers")),
        Option(("--group",), 'worker group, instead of -n: "NAME: n=2, hosts=h1,h2, slots=1, env=A=1, args=--lr 0.1, '
               'weight=2"; repeated', "GROUP", repeat=True),
    ),
    "hosts": (
        Option(("--launcher",), f"where processes run: {', '.join(sorted(BACKENDS))}, or a package's (default: ssh "
               "where hosts are named, else local)", "NAME"),
        Option(("-H", "--hostfile", "--host-file", "--hosts"), "file with a host per line, host[:port] [slots=4] "
               "[weight=3] [group=a] [iface=eth1]; or a list h1,h2", "HOSTS",
               elsewhere=("--host", "--machinefile", "-machinefile")),
        Option(("-i", "--interface"), "network interface of every host, by name, address or CIDR (default: the one "
               "that reaches the scheduler)", "INTERFACE"),
        Option(("--sync-dst-dir",), "copy this directory to DIR on every host and run there", "DIR"),
        Option(("-o", "--option"), "option of the launcher, see docs/launching.md; repeated", "NAME=VALUE",
               repeat=True),
    ),
    "environment": (
        Option(("--env",), "set a variable in every process, or pass on this shell's; repeated", "NAME[=VALUE]",
               repeat=True, elsewhere=("-x",)),
        Option(("--env-worker",), "the same for workers", "NAME[=VALUE]", repeat=True),
        Option(("--env-server",), "the same for servers and scheduler", "NAME[=VALUE]", repeat=True),
        Option(("--no-torchrun-env",), "do not set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on, for scripts "
               "that would start DDP by them"),
    ),
    "training": (
        Option(("--ddp",), "run an unchanged DDP script: init_process_group opens the backend paceline (see "
               "docs/ddp.md)"),
        Option(("--shares",), "with --ddp: deal the samples of a DistributedSampler by measured speed, and weight "
               "gradients by samples", "equal|measured", choices=("equal", "measured")),
        Option(("--staleness",), "rounds a worker may be ahead of the slowest (dist_ssync, dist_gsync)", "ROUNDS"),
        Option(("--groups",), "groups file of dist_gsync; auto: a short job measures the workers first, also for "
               "dist_auto (default: the worker groups, else the file groups of this directory if the command has the "
               "word dist_gsync)", "FILE|auto"),
        Option(("--weighting",), f"factor of a stale update: {', '.join(weighting_names(packages=False))}, or your own",
               "NAME"),
        Option(("--allow",), "an optimizer, codec, weighting or command of yours that servers import; repeated",
               "pkg.mod:Name", repeat=True),
    ),
    "failures and deadlines": (
        Option(("--max-restarts",), "start the whole job again after a failure, up to N times; the script sees "
               "PACELINE_RESTART=k", "N", int, elsewhere=("--local-num-attempt", "--restarts")),
        Option(("--replace",), "start a worker that has died again, on its host and up to N times each, while the "
               "others go on; see docs/elastic.md for what its loop needs", "N", int, least=0),
        Option(("--on-worker-death",), "stop the job, or let the other workers continue (default: stop with dist_sync, "
               "else continue)", "stop|continue", choices=("stop", "continue")),
        Option(("--timeout",), "how long any request may take, and how long a process that should exit may do nothing "
               "(default: 300)", "SECONDS", float, positive=True),
        Option(("--start-timeout",), "how long to wait for hosts, and for all processes to join (default: 60)",
               "SECONDS", float, positive=True),
        Option(("--grace",), "how long the others may go on after a failure (default: 6)", "SECONDS", float,
               positive=True),
    ),
    "output and figures": (
        Option(("--log-dir",), "folder for a file per process with all that it prints", "DIR"),
        Option(("--quiet",), "show the output of the workers and failures only: no lines at the start, no panel, no "
               "lines of progress"),
        Option(("--report-to",), "give the figures of the job to a tool: jsonl, csv, tensorboard, wandb, trackio, "
               "mlflow, otlp; repeated", "NAME[:TARGET]", repeat=True),
        Option(("--metrics",), "serve the figures of the job to Prometheus (on loopback)", "[HOST:]PORT"),
        Option(("--dashboard",), "serve a page that shows the job, on loopback; its address is printed (default port: "
               "any)", "PORT", int, least=0, without="0"),
        Option(("--report",), "write that page to a file at the end, which opens without a server", "HTML"),
    ),
    "running": (
        Option(("--config",), "job file in TOML with any of these options; the command line wins", "FILE"),
        Option(("--insecure",), "no key: only for a network that nobody else can reach"),
        Option(("--dry-run",), "print the plan, start nothing"),
    ),
}  # fmt: skip

OPTIONS = tuple(replace(one, section=section) for section, options in _SECTIONS.items() for one in options)

#: Options of stores, of servers, and of joining a job.
OF_SERVERS = frozenset({
    "--env-server", "--staleness", "--groups", "--weighting", "--allow", "--report-to", "--metrics", "--dashboard",
    "--report", "--insecure", "--on-worker-death", "--replace", "--timeout", "--start-timeout",
})  # fmt: skip

#: What to write instead, by options of other launchers; of the empty name: instead of any other.
ADVICE = {
    "": "options of your script come after it, as in: paceline launch -n 2 -- python train.py --lr 0.1",
    "--nnodes": "-n is the number of all workers and -H names the hosts, as in: paceline launch -n 8 -H h1,h2 -- ...",
    "--no-python": "leave it out: the command is run as it is",
    **dict.fromkeys(("-m", "--module"), "name the interpreter, as in: paceline launch -n 2 -- python -m mypkg.train"),
    **dict.fromkeys(
        ("--node-rank", "--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id",
         "--rdzv-conf", "--standalone", "--local-addr", "--start-method", "--monitor-interval", "--role"),
        "leave it out: the launcher starts the processes of all hosts and gives each its rank and addresses",
    ),
    **dict.fromkeys(("-r", "--redirects", "-t", "--tee"), "--log-dir DIR keeps what each process prints"),
}  # fmt: skip

USAGE = "paceline launch -n N [options] [--] command ..."

DESCRIPTION = """\
Start a job: one scheduler, S servers, and N workers that each run the command; on this machine, or on the hosts of
-H. All output appears here; every line begins with the role and rank that printed it. The job ends when all workers
are done, or when a process fails. No process is left running."""

EPILOG = """\
examples:
  paceline launch -n 4 -- python train.py --lr 0.1
  paceline launch -n 2 -H hosts -- python train.py --kv-store dist_sync
  paceline launch -n 2 -H hosts --sync-dst-dir /tmp/train -- python train.py
  paceline launch --group "fast: n=2, hosts=h1,h2" --group "old: n=2, hosts=h3, args=--batch-size 16" -- python train.py
  paceline launch -n 4 -s 1 --allow mylib.optim:Lion -- python train.py
  paceline launch -n 2 --dry-run -- python train.py

exit code:
  0 when all workers are done, otherwise that of the process that failed first (128 + n for signal n);
  130 after Ctrl-C, 143 after SIGTERM, 2 for a wrong command line or file, 127 for a command that does not exist;
  77 when the job has ended well but lost a worker on its way. A process that ends because another one failed has 76.

verbosity:
  PACELINE_VERBOSE=1 (or PS_VERBOSE=1) logs connections of servers and scheduler, 2 every message as well.

ports:
  The scheduler binds a free port itself. MASTER_PORT of torch.distributed is a port that was free when the workers
  started; another program can take it before worker 0 binds it. To choose it yourself: MASTER_PORT=29500 paceline
  launch ..., or --env MASTER_PORT=29500."""
