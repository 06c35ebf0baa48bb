"""What the survivors of a failure see, and what a process that does not belong to the job sees."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline import DistributedOptimizer, kvstore
from paceline.errors import DeadlineError, JoinTimeoutError, KeyMismatchError, PacelineError, PeerDiedError, RemoteError
from paceline.net import new_job_key
from paceline.testing import LocalJob, listen, tell
from paceline.wire import messages
from tests.integration.one_key import new_store, one_round, train_until_failure

NOTICED_WITHIN_S = 5.0
#: Of a key of 4 bytes each, that a server has not enough memory for.
LARGE_NUMEL = 50_000_000
SOURCES = str(Path(paceline.__file__).parents[1])


# ---- what runs in the workers --------------------------------------------------------------------------------------


def raise_in_round_two():
    store = new_store()
    one_round(store)
    if store.rank == 1:
        raise ArithmeticError("the loss is not a number" + 70_000 * "!")  # as long as that of a large state_dict
    try:
        one_round(store)
    except PacelineError as error:
        return [type(error).__name__, str(error)]
    return []


def train_undisturbed():
    """Train rounds that the test counts, as long as it says so."""
    store = new_store()
    tell("training")
    seen = []
    while listen() == "go":
        seen.append(one_round(store))
        tell(seen[-1])
    return seen


def wrong_shape_first():
    """The models of the workers differ; afterwards they train with the right one."""
    store = kvstore.create("dist_sync")
    found = ""
    try:
        store.init("w", torch.zeros(3 + store.rank))
    except KeyMismatchError as error:
        found = str(error)
    good = kvstore.create("dist_sync")
    good.init("w", torch.zeros(3))
    value = torch.ones(3)
    good.pushpull("w", value)
    return [found, value.tolist()]


def uneven_steps():
    """Worker r makes 4 + 2 r steps and leaves."""
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync", model=model)
    steps = 4 + 2 * optimizer.kvstore.rank
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    optimizer.kvstore.close()
    return steps


def miss_a_deadline():
    """Worker 1 does not push; worker 0 says so at its deadline, and then in a barrier."""
    store = new_store("deadline")
    found = []
    if store.rank == 0:
        for wait in (lambda: one_round(store), store.barrier):
            try:
                wait()
            except DeadlineError as error:
                found.append(str(error))
        tell("waited")
    else:
        listen()
    return found


def break_the_optimizer():
    store = kvstore.create("dist_sync", namespace="broken")
    store.set_optimizer("faulty:Faulty", lr=1.0)
    store.init("w", torch.zeros(4))
    errors = []
    for _ in range(2):
        try:
            store.pushpull("w", torch.ones(4))
        except RemoteError as error:
            errors.append(str(error))
    other = kvstore.create("dist_sync", namespace="whole")
    other.init("w", torch.zeros(4))
    value = torch.ones(4)
    other.pushpull("w", value)
    return [errors, value.tolist()]


def forbidden_optimizer():
    store = kvstore.create("dist_sync", namespace="forbidden")
    try:
        store.set_optimizer("os:getcwd")
    except ValueError as error:
        return str(error)
    return ""


def join():
    """Try to join the job; return [error type, text]."""
    try:
        kvstore.create("dist_sync")
    except PacelineError as error:
        return [type(error).__name__, str(error)]
    return ["joined", ""]


def join_with_another_version():
    """Try to join the job as a process of another release of paceline does."""
    messages.PROTOCOL += 1
    return join()


def fill_the_memory():
    """Train; worker 1 takes memory until it is killed. Return what the others see, as train_until_failure."""
    store = new_store()
    one_round(store)
    tell("training")
    if store.rank == 1:
        listen()
        taken = []
        while True:
            taken.append(b"x" * 10_000_000)
    try:
        while True:
            one_round(store)
    except PacelineError as error:
        return [type(error).__name__, str(error), time.monotonic()]


def init_more_than_the_server_can_hold():
    """Return what is said of a key that is too large for the server, and the sum of a round of a small one after it."""
    small = new_store("small")
    one_round(small)
    tell("ready")
    listen()
    large = kvstore.create("dist_sync", namespace="large")
    error = ""
    if small.rank == 0:  # the others would wait for its values
        try:
            large.init("w", torch.zeros(LARGE_NUMEL))
        except PacelineError as found:
            error = f"{type(found).__name__}: {found}"
    small.barrier()
    return [error, one_round(small)]


def train_then_break_the_optimizer():
    """Scenarios that leave the job alive, in one job."""
    return {"shape": wrong_shape_first(), "broken": break_the_optimizer(), "steps": uneven_steps()}


FAULTY = """
import torch

class Faulty(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("this optimizer never works")
"""


# ---- a member is killed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["worker 1", "server 1", "scheduler 0"])
def test_survivors_of_kill_9_name_the_dead_within_seconds(victim):
    with LocalJob(3, 2, timeout_s=60) as job:
        workers = job.start_all(train_until_failure)
        assert [worker.heard() for worker in workers] == ["training"] * 3
        role, rank = victim.split()
        dead = {"worker": workers, "server": job.servers, "scheduler": [job.scheduler]}[role][int(rank)]
        killed = time.monotonic()
        dead.kill(signal.SIGKILL)
        survivors = [worker for worker in workers if worker is not dead]
        for kind, text, when, dead_nodes in [worker.result(30) for worker in survivors]:
            assert kind == PeerDiedError.__name__
            assert f"{victim} on 127.0.0.1" in text
            assert when - killed < NOTICED_WITHIN_S
            # A dead scheduler is in no list of the dead: it is the one that makes the list.
            assert dead_nodes == (0 if role == "scheduler" else 1)
        # Servers and scheduler end too, with an exit code that says that the cause was another member.
        others = [one for one in (*job.servers, job.scheduler) if one is not dead]
        assert all(one.wait(30) != 0 for one in others)


LAUNCHED = """
import sys
sys.path.insert(0, {root!r})
from tests.integration import test_failures
test_failures.train_until_failure_of_a_launched_job()
"""


def train_until_failure_of_a_launched_job():
    store = new_store()
    one_round(store)
    print(f"training {os.getpid()} {store.session.servers[1].pid}", flush=True)
    while True:
        one_round(store)


def processes_of(marker):
    """Return the command lines, by process id, of processes that have a marker in their environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = " ".join((entry / "cmdline").read_text().split("\0"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("victim", ["worker", "server", "scheduler"])
def test_launch_ends_with_an_error_and_leaves_nothing_running(victim, tmp_path):
    marker = f"PACELINE_TEST_MARKER={victim}-{os.getpid()}-{tmp_path.name}"
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED.format(root=str(Path(__file__).parents[2])))
    env = os.environ | dict([marker.split("=")]) | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "2", "--", sys.executable, str(script)]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            lines = []
            while sum("training" in line for line in lines) < 2:
                lines.append(launcher.stdout.readline())
                assert lines[-1], "".join(lines)
            words = next(line for line in lines if "training" in line).split("training ")[1].split()
            commands = processes_of(marker)
            pids = {"worker": int(words[0]), "server": int(words[1])}
            pids["scheduler"] = next(pid for pid, command in commands.items() if "paceline scheduler" in command)
            os.kill(pids[victim], signal.SIGKILL)
            output = "".join(lines) + launcher.stdout.read()
            assert launcher.wait(30) == 128 + signal.SIGKILL, output
        finally:
            launcher.kill()
    assert f"{victim} " in output
    assert processes_of(marker) == {}


@contextlib.contextmanager
def cgroup_of(pid, limit_bytes):
    """Limit what memory a process may take from now on; the kernel kills it when it takes more."""
    found = [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", True),
        (Path("/sys/fs/cgroup"), "memory.max", "memory" in _read("/sys/fs/cgroup/cgroup.subtree_control")),
    ]
    parents = [(path, name) for path, name, may in found if may and path.is_dir() and os.access(path, os.W_OK)]
    if os.geteuid() != 0 or not parents:
        pytest.skip("a limit of memory needs root and a cgroup")
    parent, name = parents[0]
    group = parent / f"paceline-test-{pid}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        until = time.monotonic() + 10
        while _read(group / "cgroup.procs").strip() and time.monotonic() < until:
            time.sleep(0.05)
        group.rmdir()


def _read(path):
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@pytest.mark.root
def test_worker_that_the_kernel_kills_for_memory_is_named():
    with LocalJob(2, 1, timeout_s=60) as job:
        workers = job.start_all(fill_the_memory)
        assert [worker.heard() for worker in workers] == ["training"] * 2
        with cgroup_of(workers[1].pid, 300_000_000):
            workers[1].tell("go")
            assert workers[1].wait(60) == -signal.SIGKILL
            killed = time.monotonic()
            kind, text, when = workers[0].result(30)
        assert kind == PeerDiedError.__name__
        assert "worker 1 on 127.0.0.1 died: its process has ended" in text
        assert when - killed < NOTICED_WITHIN_S


@pytest.mark.parametrize("settings", [{}, {"shared_memory": False, "unix_sockets": False}], ids=["memory", "tcp"])
def test_server_that_has_no_memory_for_a_key_says_so_and_serves_the_others(settings):
    with LocalJob(2, 1, timeout_s=60, **settings) as job:
        workers = job.start_all(init_more_than_the_server_can_hold)
        assert [worker.heard() for worker in workers] == ["ready"] * 2
        status = _read(f"/proc/{job.servers[0].pid}/status")
        size = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize:"))
        resource.prlimit(job.servers[0].pid, resource.RLIMIT_AS, (size + LARGE_NUMEL, size + LARGE_NUMEL))
        for worker in workers:
            worker.tell("go")
        (error, first), (none, second) = [worker.result(30) for worker in workers]
        assert error.startswith("RemoteError: ")
        assert "memory" in error
        assert none == ""
        assert first == second == 4.0
        assert [one.wait(30) for one in (*job.servers, job.scheduler)] == [0, 0]


def test_a_worker_that_raises_is_named_with_its_exception():
    with LocalJob(2, 1, timeout_s=60) as job:
        workers = job.start_all(raise_in_round_two)
        kind, text = workers[0].result(60)
        assert kind == PeerDiedError.__name__
        assert "worker 1 on 127.0.0.1 died: it raised ArithmeticError: the loss is not a number!" in text
        assert workers[1].wait(30) == 1
        assert "ArithmeticError" in workers[1].output


# ---- strangers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strangers():
    """Two workers train while others try to join; returns what these saw, and what the two summed up."""
    with LocalJob(2, 1, timeout_s=60) as job:
        workers = job.start_all(train_undisturbed)
        assert [worker.heard() for worker in workers] == ["training"] * 2
        short = {"PACELINE_START_TIMEOUT_S": "20"}
        attempts = {
            "no key": {"PACELINE_JOB_KEY": ""},
            "another key": {"PACELINE_JOB_KEY": new_job_key()},
            "insecure": {"PACELINE_JOB_KEY": "", "PACELINE_INSECURE": "1"},
            "damaged key": {"PACELINE_JOB_KEY": "abc"},
            "duplicate rank": {},
            "rank too large": {"PACELINE_RANK": "7"},
            "any rank": {"PACELINE_RANK": "-1"},
            "another job": {"PACELINE_JOB_ID": "other"},
            "another size": {"PACELINE_NUM_WORKERS": "3"},
        }
        tried = {name: job.start(1, join, environment=short | change) for name, change in attempts.items()}
        tried["another version"] = job.start(1, join_with_another_version, environment=short)
        found, rounds = {}, 0
        for name, stranger in tried.items():
            while stranger.code is None:
                rounds += 1
                for worker in workers:
                    worker.tell("go")
                assert [worker.heard() for worker in workers] == [2.0 * rounds] * 2
            found[name] = stranger.result()
        for worker in workers:
            worker.tell("stop")
        found["trained"] = [worker.result() for worker in workers]
        found["codes"] = [one.wait(30) for one in (*job.servers, job.scheduler)]
        return found


@pytest.mark.parametrize(
    ("attempt", "kind", "words"),
    [
        ("no key", "ConfigError", "no job key: set PACELINE_JOB_KEY"),
        ("another key", "AuthenticationError", "PACELINE_JOB_KEY"),
        ("insecure", "AuthenticationError", "PACELINE_INSECURE"),
        ("damaged key", "ConfigError", "3 characters, not 40"),
        ("duplicate rank", "RendezvousError", "this rank is taken by worker 1 on 127.0.0.1"),
        ("rank too large", "RendezvousError", "ranks 0 to 1"),
        ("any rank", "RendezvousError", "are there already"),
        ("another job", "RendezvousError", "'other'"),
        ("another size", "RendezvousError", "3 workers"),
        ("another version", "RendezvousError", "install the same paceline everywhere"),
    ],
)
def test_a_process_that_does_not_belong_to_the_job_is_told_why(strangers, attempt, kind, words):
    assert strangers[attempt][0] == kind
    assert words in strangers[attempt][1]


def test_strangers_do_not_disturb_the_training(strangers):
    first, second = strangers["trained"]
    assert first == second == [2.0 * (i + 1) for i in range(len(first))]
    assert strangers["codes"] == [0, 0]


# ---- faults that leave the job alive -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "faulty.py").write_text(FAULTY)
    path = os.pathsep.join([SOURCES, str(folder)])
    with LocalJob(2, 2, timeout_s=60, environment={"PYTHONPATH": path}, allow="faulty:Faulty") as job:
        return job.run(train_then_break_the_optimizer)


def test_a_worker_with_another_shape_is_told_and_the_others_train_on(survived):
    assert survived[0]["shape"] == ["", [2.0] * 3]
    text, values = survived[1]["shape"]
    assert "key 'w' has shape (4,)" in text
    assert "worker 1, but shape (3,)" in text
    assert values == [2.0] * 3


def test_an_optimizer_that_raises_on_the_server_reaches_every_caller(survived):
    for worker in survived:
        errors, values = worker["broken"]
        assert len(errors) == 2
        assert all("ZeroDivisionError: this optimizer never works" in text for text in errors)
        assert all("'w'" in text or " w " in text for text in errors)
        assert values == [2.0] * 4


def test_workers_with_more_steps_go_on_after_the_others_have_left(survived):
    assert [worker["steps"] for worker in survived] == [4, 6]


def test_worker_that_never_comes_is_named_after_the_start_timeout():
    with LocalJob(2, 1, start_timeout_s=6) as job:
        worker = job.start(0, join)
        started = time.monotonic()
        kind, text = worker.result(60)
        assert kind == JoinTimeoutError.__name__
        assert "worker 1 did not join within 6 s" in text
        assert time.monotonic() - started < 30
        assert job.servers[0].wait(30) != 0
        assert job.scheduler.wait(30) == 1


def step_at_unlike_speeds():
    """Worker 1 takes 5 s for its local steps; return the seconds for which this worker has trained."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), "dist_sync", samples=1, local_steps=10)
    began = time.monotonic()
    for _ in range(10):
        time.sleep(0.5 * optimizer.kvstore.rank)
        weight.sum().backward()
        optimizer.step()
    return time.monotonic() - began


def test_a_deadline_is_not_for_workers_that_take_steps():
    with LocalJob(2, 1, timeout_s=2.5) as job:
        assert min(job.run(step_at_unlike_speeds)) > 4


def test_a_deadline_names_who_is_missing():
    with LocalJob(2, 1, timeout_s=3) as job:
        workers = job.start_all(miss_a_deadline)
        assert workers[0].heard() == "waited"
        workers[1].tell("enough")
        in_push, in_barrier = workers[0].result()
    assert "push of round 1" in in_push
    for text in (in_push, in_barrier):
        assert "was not answered within 3 s" in text
        assert "it waits for worker 1 on 127.0.0.1" in text
        assert "PACELINE_TIMEOUT_S" in text
        assert "\n" not in text, "what happened to the key goes to the log, at level DEBUG"
