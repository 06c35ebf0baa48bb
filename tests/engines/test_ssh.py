"""The launcher ssh on four hosts with real ssh servers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import paceline
from paceline.launch.remote.agent_link import SILENCE_S
from tests.clusters.ssh import SshHosts, why_no_ssh
from tests.engines.small_jobs import trained, write_training

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh())]

PACKAGE = Path(paceline.__file__).parent
#: Far more than anything here takes.
DEADLINE_S = 60.0
#: After which nothing may run on any host.
CLEAN_S = 5.0
#: After which an ssh server has noticed that its client is gone: by a retransmission that is due at twice the time for
#: which the network was cut.
SERVER_NOTICES_S = 60.0


@pytest.fixture(scope="module")
def copies() -> Iterator[str]:
    """A folder that each host has for itself, and each run of the tests."""
    with tempfile.TemporaryDirectory(prefix="paceline-copies-", dir="/var/tmp") as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(copies: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """h0 runs the launcher; h1 is plain; h2 has an interface of another name; h3 has no checkout, h4 no Python."""
    hidden = {index: [copies] for index in range(1, 5)}
    hidden[3].append(str(PACKAGE.parents[1]))
    hidden[4].append(str(Path.home()))  # a shell would find Python by its start-up files
    bare = tmp_path_factory.mktemp("bare")
    for name in ("sh", "sleep"):
        (bare / name).symlink_to(str(shutil.which(name)))
    with SshHosts(5, hidden=hidden, paths={4: str(bare)}) as made:
        for words in ("link set eth0 down", "link set eth0 name net7", "link set net7 up"):
            made[2].run(f"ip {words}")
        yield made


class Launch:
    """One ``paceline launch``."""

    def __init__(self, cluster: SshHosts, words: list[str], hosts: list[str], folder: Path, **options: Any) -> None:
        self._cluster = cluster
        ssh = options.pop("ssh", f"ssh -F {cluster.client_config}")
        hostfile = cluster.hostfile(hosts)
        command = [
            "env",
            f"PATH={options.pop('path', os.environ['PATH'])}",
            sys.executable,
            "-m",
            "paceline",
            "launch",
            "-H",
            hostfile,
            "-o",
            f"ssh={ssh}",
            *words,
        ]
        self.process = subprocess.Popen(
            cluster.command(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=open(folder / "err", "wb"),  # noqa: SIM115
            cwd=options.pop("cwd", folder),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | options.pop("env", {}),
        )
        self._err = folder / "err"
        self.out = ""

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        self.out += self.process.communicate(timeout=timeout_s)[0].decode()
        return self.process.returncode

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for_line(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out += line.decode()
            if text in line.decode():
                return
        pytest.fail(f"{text!r} did not come: {self.out}{self.err}")

    def left(self) -> list[str]:
        return [one for index in range(len(self._cluster.hosts)) for one in self._cluster.processes(index)]

    def assert_nothing_left(self, clean_s: float = CLEAN_S) -> None:
        until = time.monotonic() + clean_s
        while left := self.left():
            assert time.monotonic() < until, left
            time.sleep(0.05)


Make = Callable[..., Launch]


@pytest.fixture
def launch(cluster: SshHosts, tmp_path: Path) -> Iterator[Make]:
    made: list[Launch] = []

    def start(*words: str, hosts: tuple[str, ...] = ("h1", "h2"), **options: Any) -> Launch:
        made.append(Launch(cluster, list(words), list(hosts), tmp_path, **options))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        one.assert_nothing_left()


def script(text: str) -> list[str]:
    return ["--", "sh", "-c", text]


def test_processes_run_on_their_hosts_in_the_same_directory(launch: Make, tmp_path: Path) -> None:
    job = launch("-n", "3", "-s", "0", *script("echo $(hostname) $RANK/$WORLD_SIZE $LOCAL_RANK $(pwd) $MASTER_ADDR"))
    assert (job.wait(), job.err) == (0, "")
    assert sorted(job.out.splitlines()) == [
        f"[worker 0] h1 0/3 0 {tmp_path} 10.77.0.2",
        f"[worker 1] h1 1/3 1 {tmp_path} 10.77.0.2",
        f"[worker 2] h2 2/3 0 {tmp_path} 10.77.0.2",
    ]


def test_variables_arrive_as_they_are_and_on_no_command_line(launch: Make, tmp_path: Path) -> None:
    value = "a b,c \"d\" 'e' $HOME \\ `id` \n*"
    text = (
        'printf "%s" "$GREETING" >value; tr "\\0" "\\n" </proc/$$/environ | grep -q "^MXNET_X=1$" && echo passed on; '
        "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' >commands; echo $W"
    )
    job = launch(
        *("-n", "1", "-s", "0", "--env", f"GREETING={value}", "--env-worker", "W=w"),
        *script(text),
        hosts=("h1",),
        env={"MXNET_X": "1"},
    )
    assert job.wait() == 0, job.err
    assert job.out == "[worker 0] passed on\n[worker 0] w\n"
    assert (tmp_path / "value").read_text() == value
    commands = (tmp_path / "commands").read_text()
    assert "paceline agent" in commands
    assert "d" * 1 in commands
    assert "`id`" not in commands


def test_job_with_servers_trains_and_its_key_is_on_no_command_line(launch: Make, tmp_path: Path) -> None:
    job = launch("-n", "2", "-s", "2", "--", sys.executable, write_training(tmp_path), env={"PS_VERBOSE": "1"})
    assert job.wait() == 0, job.err
    assert trained(job.out, ["h1", "h2"]), job.out
    job.assert_nothing_left()


def test_first_failure_is_reported_last_with_host_and_code(launch: Make) -> None:
    text = "test $RANK = 1 || exec sleep 1000; i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo line $i; done; exit 7"
    job = launch("-n", "2", "-s", "0", "--grace", "0.5", *script(text))
    assert job.wait() == 7
    block = job.err.splitlines()[-34:]
    assert re.fullmatch(r"worker 1 on h2 failed: exit code 7, \d+\.\d s after the start", block[1])
    assert block[2:-1] == ["its last lines:", *(f"    line {number}" for number in range(11, 41))]
    job.assert_nothing_left()


def test_output_is_kept_in_a_file_per_process(launch: Make, tmp_path: Path) -> None:
    job = launch("-n", "2", "-s", "0", "--log-dir", "logs", *script("echo out $RANK; echo err $RANK >&2"))
    assert job.wait() == 0
    for rank in (0, 1):
        path = tmp_path / "logs" / f"worker-{rank}.log"
        assert sorted(path.read_text().splitlines()) == [f"err {rank}", f"out {rank}"]
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_ends(launch: Make, cluster: SshHosts, signum: int) -> None:
    job = launch("-n", "2", "-s", "0", *script("echo runs; setsid sleep 1000 & sleep 1000"))
    job.wait_for_line("runs")
    job.process.send_signal(signum)
    assert job.wait() == (-signum if signum == signal.SIGKILL else 128 + signum)
    until = time.monotonic() + CLEAN_S
    while job.left() and time.monotonic() < until:  # a session of its own escapes, as from a launcher on this machine
        for index in (1, 2):
            cluster.end(index, "sleep 1000")
        time.sleep(0.05)
    job.assert_nothing_left()


def test_interrupt_while_hosts_are_reached(launch: Make, cluster: SshHosts) -> None:
    cluster[2].run("iptables -A INPUT -p tcp --dport 2222 -j DROP")
    try:
        job = launch("-n", "2", "-s", "0", *script("exit 0"))
        launcher = psutil.Process(job.process.pid)
        wait_until(lambda: "ssh" in [child.name() for child in launcher.children(recursive=True)])
        job.process.send_signal(signal.SIGINT)
        assert job.wait(10) == 130
    finally:
        cluster[2].run("iptables -F")


def test_interrupt_while_the_directory_is_copied(launch: Make, copies: str, tmp_path: Path) -> None:
    rsync = tmp_path / "bin" / "rsync"
    rsync.parent.mkdir()
    rsync.write_text(f"#!/bin/sh\ntouch {tmp_path}/copies\nexec sleep 1000\n")
    rsync.chmod(0o755)
    words = ["-n", "1", "-s", "0", "--sync-dst-dir", f"{copies}/c", *script("exit 0")]
    job = launch(*words, hosts=("h1",), path=f"{rsync.parent}:{os.environ['PATH']}")
    wait_until((tmp_path / "copies").exists)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert "Traceback" not in job.err


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_interrupt_while_processes_start(launch: Make, cluster: SshHosts, role: str) -> None:
    sign = "sleep 1000" if role == "worker" else f"paceline {role}"
    job = launch("-n", "1", "-s", "1", *script("sleep 1000"), hosts=("h1",))
    wait_until(lambda: any(sign in line for line in cluster.processes(1)))
    job.process.send_signal(signal.SIGINT)
    assert job.wait(20) == 130
    assert "Traceback" not in job.err


def test_second_interrupt_while_workers_save(launch: Make, cluster: SshHosts) -> None:
    text = "trap 'echo saves; sleep 1000' INT TERM; echo runs; while :; do sleep 0.1; done"
    job = launch("-n", "1", "-s", "0", "--grace", "500", *script(text), hosts=("h1",))
    job.wait_for_line("runs")
    job.process.send_signal(signal.SIGINT)
    job.wait_for_line("saves")
    job.process.send_signal(signal.SIGINT)
    assert job.wait(20) == 130


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_host_that_dies_is_named(launch: Make, cluster: SshHosts) -> None:
    job = launch("-n", "2", "-s", "0", "--grace", "1", *script("echo runs $RANK; exec sleep 1000"))
    job.wait_for_line("runs 1")
    cluster.kill(2)
    try:
        assert job.wait() != 0
        assert "worker 1 on h2 failed" in job.err
        assert "the connection to host h2 ended" in job.err
    finally:
        cluster.start(2)


@pytest.mark.slow
def test_host_that_is_cut_off_is_named_and_ends_its_processes_itself(launch: Make, cluster: SshHosts) -> None:
    job = launch("-n", "2", "-s", "0", "--grace", "1", *script("echo runs $RANK; exec sleep 1000"))
    job.wait_for_line("runs 1")
    cluster[2].run("ip link set net7 down")
    try:
        assert job.wait() != 0
        assert "worker 1 on h2 failed" in job.err
        until = time.monotonic() + SILENCE_S + CLEAN_S
        while left := [one for one in cluster.processes(2) if not one.startswith("sshd")]:
            assert time.monotonic() < until, left
            time.sleep(0.1)
    finally:
        cluster[2].run("ip link set net7 up")
    job.assert_nothing_left(SERVER_NOTICES_S)


def test_job_starts_again_after_a_failure(launch: Make) -> None:
    text = "echo try $PACELINE_RESTART; test $PACELINE_RESTART = 2 || exit 3"
    job = launch("-n", "1", "-s", "0", "--max-restarts", "2", *script(text), hosts=("h1",))
    assert job.wait() == 0, job.err
    assert job.out == "".join(f"[worker 0] try {number}\n" for number in range(3))
    assert "[launch] restart 2 of 2" in job.err
    job = launch("-n", "1", "-s", "0", "--max-restarts", "1", *script(text), hosts=("h1",))
    assert job.wait() == 3


def test_job_starts_again_without_a_host_that_was_lost(launch: Make, cluster: SshHosts) -> None:
    words = ["-n", "2", "-s", "0", "--grace", "0.2", "--max-restarts", "1", "--start-timeout", "10"]
    job = launch(*words, *script("echo runs $RANK $(hostname); test $PACELINE_RESTART = 1 || exec sleep 1000"))
    job.wait_for_line("runs 1 h2")
    cluster.kill(2)
    try:
        assert job.wait() == 0, job.err
        assert "the job goes on without h2, on h1\n" in job.err
        assert job.out.endswith(("runs 0 h1\n", "runs 1 h1\n"))
    finally:
        cluster.start(2)


@pytest.mark.slow
def test_host_that_is_cut_off_is_not_said_to_hang_in_its_kernel(launch: Make, cluster: SshHosts) -> None:
    text = "trap '' INT TERM; echo runs $RANK; while :; do sleep 1; done"
    ssh = f"ssh -F {cluster.client_config} -o ServerAliveInterval=0"
    job = launch("-n", "2", "-s", "0", "--grace", "1", *script(text), ssh=ssh)
    job.wait_for_line("runs 1")
    cluster[2].run("ip link set net7 down")
    try:
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
    finally:
        cluster[2].run("ip link set net7 up")
    job.assert_nothing_left(SERVER_NOTICES_S)
    assert "worker 1 may run on: no word from there" in job.err
    assert "cannot be killed" not in job.err


def test_directory_is_copied_where_it_is_missing(launch: Make, copies: str, tmp_path: Path) -> None:
    """As MXNet's documentation has it: the library lies beside the script, and travels with it."""
    here = tmp_path / "work"
    here.mkdir()
    (here / "train.py").write_text("import paceline, socket, os\nprint(socket.gethostname(), paceline.__file__)\n")
    shutil.copytree(PACKAGE, here / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    # The agent needs no more than this of what paceline depends on, and h3 has none of it.
    shutil.copytree(
        Path(psutil.__file__).parent, here / "psutil", ignore=shutil.ignore_patterns("__pycache__", "tests")
    )
    there = f"{copies}/a/train here"
    words = ["-n", "2", "-s", "0", "--sync-dst-dir", there, "--", "python", "train.py"]
    job = launch(*words, hosts=("h1", "h3"), cwd=here, env={"RSYNC_RSH": "false"})
    assert job.wait() == 0, job.err
    assert sorted(job.out.splitlines()) == [
        f"[worker 0] h1 {there}/paceline/__init__.py",
        f"[worker 1] h3 {there}/paceline/__init__.py",
    ]


NEW_USER = [
    (("nosuchhost.invalid",), [], "host nosuchhost.invalid is unknown: check its name in the hosts file"),
    (("h1:2223",), [], "host h1 has no ssh server at that port"),
    (
        ("h4",),
        ["-o", "python=/none"],
        "host h4 has no such Python (not found: /none): install it there, or name one: -o python=PATH",
    ),
    (("h2",), ["-i", "eth0"], "interface 'eth0' does not exist on h2 or has no address; found lo 127.0.0.1, net7 10"),
    (("h1 slots=1", "h2 slots=1"), ["-n", "3"], "3 workers do not fit: the hosts h1, h2 have 2 slots for them"),
]


@pytest.mark.parametrize(("hosts", "words", "message"), NEW_USER)
def test_mistake_ends_with_a_sentence_that_says_what_to_do(
    launch: Make, hosts: tuple[str, ...], words: list[str], message: str
) -> None:
    job = launch("-n", "2", "-s", "0", *words, *script("exit 0"), hosts=hosts)
    assert job.wait(20) in (1, 2)
    assert message in job.err
    assert job.err.startswith("paceline launch: ")
    assert "Traceback" not in job.err


def test_host_without_paceline_is_explained(launch: Make, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nunset PYTHONPATH\nexec python3 -S "$@"\n')
    python.chmod(0o755)
    job = launch("-n", "1", "-o", f"python={python}", *script("exit 0"), hosts=("h3",))
    assert job.wait(20) == 1
    assert "host h3 has Python but not paceline: install it there" in job.err


def test_refused_key_is_explained(launch: Make, cluster: SshHosts) -> None:
    text = Path(cluster.client_config).read_text()
    (cluster.folder / "other_config").write_text(text.replace(f"{cluster.folder}/id\n", f"{cluster.folder}/stranger\n"))
    job = launch("-n", "1", *script("exit 0"), hosts=("h1",), ssh=f"ssh -F {cluster.folder}/other_config")
    assert job.wait(20) == 1
    assert "host h1 refused your ssh key: install it with `ssh-copy-id h1`" in job.err


def test_users_options_for_shells_of_their_own_do_not_count(launch: Make, cluster: SshHosts) -> None:
    own = "RemoteCommand tmux\nStdinNull yes\nForkAfterAuthentication yes\nSessionType none\n"
    (cluster.folder / "own_config").write_text(f"{own}{Path(cluster.client_config).read_text()}")
    job = launch("-n", "1", "-s", "0", *script("echo $RANK"), hosts=("h1",), ssh=f"ssh -F {cluster.folder}/own_config")
    assert job.wait(20) == 0, job.err
    assert job.out == "[worker 0] 0\n"


def test_unknown_host_key_is_explained(launch: Make, cluster: SshHosts) -> None:
    job = launch(
        "-n",
        "1",
        *script("exit 0"),
        hosts=("h1",),
        ssh=f"ssh -F {cluster.client_config} -o UserKnownHostsFile=/dev/null",
    )
    assert job.wait(20) == 1
    assert "host h1 has a host key that ssh does not know: connect once by hand with `ssh h1`" in job.err


def test_host_that_does_not_answer_is_named_at_the_deadline(launch: Make, cluster: SshHosts) -> None:
    cluster[2].run("iptables -A INPUT -p tcp --dport 2222 -j DROP")
    try:
        job = launch(
            "-n",
            "2",
            "--start-timeout",
            "8",
            *script("exit 0"),
            ssh=f"ssh -F {cluster.client_config} -o ConnectTimeout=50",
        )
        assert job.wait(30) == 1
        assert "no answer from h2 within 8 s; 1 other host is ready" in job.err
    finally:
        cluster[2].run("iptables -F")


def test_missing_command_on_a_host_is_explained(launch: Make) -> None:
    job = launch("-n", "1", "-s", "0", "--", "no-such-command", hosts=("h1",))
    assert job.wait(20) == 127
    assert "worker 0 on h1 failed: the command 'no-such-command' is not on the PATH" in job.err


def test_missing_rsync_is_explained(launch: Make, copies: str) -> None:
    words = ["-n", "1", "-s", "0", "--sync-dst-dir", f"{copies}/b", *script("exit 0")]
    job = launch(*words, hosts=("h4",))
    assert job.wait(20) == 1
    assert "host h4: the program 'rsync' is missing there; install the package rsync" in job.err
    job = launch(*words, hosts=("h1",), path="/nowhere")
    assert job.wait(20) == 1
    assert "the program 'ssh' is not on the PATH of this machine; install the package openssh-client" in job.err


@pytest.mark.parametrize("interface", ["10.77.0.0/24", "10.77.0.2"])
def test_interface_may_be_given_as_a_network_or_an_address(launch: Make, interface: str, tmp_path: Path) -> None:
    job = launch("-n", "1", "-s", "1", "-i", interface, "--", sys.executable, write_training(tmp_path), hosts=("h1",))
    assert job.wait() == 0, job.err


def test_each_host_may_have_an_interface_of_its_own(launch: Make, tmp_path: Path) -> None:
    job = launch(
        "-n", "2", "-s", "2", "--", sys.executable, write_training(tmp_path), hosts=("h1 iface=eth0", "h2 iface=net7")
    )
    assert job.wait() == 0, job.err
    assert job.out.count("[3.0, 3.0]") == 2


def command(cluster: SshHosts, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    argv = cluster.command([sys.executable, "-m", "paceline", *words, "--ssh", f"ssh -F {cluster.client_config}"])
    return subprocess.run(
        argv, cwd=cluster.folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_doctor_finds_nothing_on_good_hosts(cluster: SshHosts) -> None:
    done = command(cluster, "doctor", "-H", "h1,h2")
    assert done.returncode == 0, done.stdout + done.stderr
    head, first, second, *rest = done.stdout.splitlines()
    assert head.split()[:2] == ["host", "ssh"]
    assert first.split()[:2] == ["h1", "ok"]
    assert first.endswith("1 of 1  shared")
    assert "10.77.0.3" in second
    assert rest == ["", "nothing to fix"]


def test_doctor_says_what_to_fix(cluster: SshHosts) -> None:
    cluster[2].run("iptables -A INPUT -p tcp -s 10.77.0.2 -j DROP")
    try:
        hosts = cluster.hostfile(["h1 iface=eth0", "h2 iface=net7", "h0 iface=none", "nosuchhost.invalid"])
        done = command(cluster, "doctor", "-H", hosts)
    finally:
        cluster[2].run("iptables -F")
    assert done.returncode == 1, done.stderr
    fixes = done.stdout.partition("to fix:\n")[2]
    for text in (
        "h2: cannot be reached by h1: no answer within 3 s; open the ports between the hosts",
        "h0: interface 'none' does not exist on h0",
        "nosuchhost.invalid: host nosuchhost.invalid is unknown",
    ):
        assert f"  {text}" in fixes


def test_what_a_job_left_on_a_host_is_killed(launch: Make, cluster: SshHosts) -> None:
    job = launch("-n", "1", "-s", "0", *script("setsid sh -c 'echo runs; exec sleep 1000' & wait"), hosts=("h1",))
    job.wait_for_line("runs")
    job.process.kill()
    job.wait()
    until = time.monotonic() + CLEAN_S
    while [one for one in cluster.processes(1) if one != "sleep 1000"]:
        assert time.monotonic() < until, cluster.processes(1)
        time.sleep(0.05)
    assert cluster.processes(1) == ["sleep 1000"]
    done = command(cluster, "kill", "-H", "h1,")
    assert "sleep 1000" in done.stdout
    assert "nothing was ended: there is no terminal to ask at" in done.stderr
    assert cluster.processes(1) == ["sleep 1000"]
    done = command(cluster, "kill", "-H", "h1,", "--yes")
    assert done.stdout.endswith("h1: 1 process killed\n")
    job.assert_nothing_left()
