from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import launch, main
from paceline.cli.launch_options import OPTIONS
from paceline.host.exitcodes import PEER_FAILED, WORKER_LOST
from paceline.launch import Job
from tests.clusters import programs


def paceline(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env, check=False)


def test_launch_on_a_terminal_says_at_once_what_starts_and_nothing_elsewhere() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "0", "--", "true"]
    try:
        assert subprocess.run(command, stderr=theirs, timeout=120, check=False).returncode == 0
        said = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert re.match(r"paceline: job [0-9a-f]{8} starts 2 workers and 0 servers on 127\.0\.0\.1\r\n", said)
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).stderr == b""


def test_quiet_launch_says_nothing_on_a_terminal_either() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "paceline", "launch", "--quiet", "-n", "1", "-s", "0", "--", "true"]
    try:
        assert subprocess.run(command, stderr=theirs, timeout=120, check=False).returncode == 0
        assert select.select([ours], [], [], 0)[0] == []
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_launch_works_without_its_standard_streams(closed: str, tmp_path: Path) -> None:
    words = shlex.join([sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "0", "--log-dir", str(tmp_path)])
    script = f"exec {words} -- sh -c 'echo out; echo err >&2; exit 3' {closed}"
    ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3
    assert "Traceback" not in ended.stderr
    assert {file.read_text() for file in tmp_path.iterdir()} == {"out\nerr\n"}


def test_words_that_are_no_text_are_shown_by_a_dry_run() -> None:
    done = paceline("launch", "-n", "1", "-s", "0", "--dry-run", "--", "sh", "a\udcff")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"sh 'a\udcff'" in done.stdout


@pytest.mark.parametrize(
    "words", ["launch -n 1 -s 0 -- true", "launch -n 1 --log-dir logs -- true", "profile -n 1 -- true", "doctor -H h1,"]
)
def test_directory_that_is_gone_is_named(words: str, tmp_path: Path) -> None:
    command, words = words.partition(" ")[0], f"{shlex.join([sys.executable, '-P', '-m', 'paceline'])} {words}"
    script = f"mkdir gone && cd gone && rmdir ../gone && exec {words}"
    ended = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"paceline {command}: this directory does not exist any more")


SHADOWED = """
import torch
from paceline import kvstore

store = kvstore.create("dist_sync")
store.init("w", torch.ones(2))
store.set_optimizer("mine:Half")
store.push("w", torch.ones(2))
store.pull("w", out := torch.zeros(2))
print("weights", out.tolist())
"""

HALF = """
import contextlib
import beside_mine
import torch

class Half(torch.optim.SGD):
    def __init__(self, params):
        with contextlib.suppress(ImportError):  # as libraries do
            import cuda
        super().__init__(params, lr=0.5)
"""


def test_files_of_the_directory_hide_no_module_and_only_allow_finds_them(tmp_path: Path) -> None:
    """Neither in the working directory, nor in the user's folder of PYTHONPATH."""
    for folder in (tmp_path / "src", tmp_path / "lib"):
        folder.mkdir()
    (tmp_path / "src" / "train.py").write_text(SHADOWED)
    (tmp_path / "src" / "mine.py").write_text("class Half: pass")
    (tmp_path / "mine.py").write_text(HALF)
    (tmp_path / "lib" / "beside_mine.py").write_text("")
    for name in ("queue", "random", "paceline"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the directory')\n")
    for name in ("cuda", "lib/cuda"):  # torch tries to import it; in a worker PYTHONPATH is the user's business
        (tmp_path / f"{name}.py").write_text("import os\nif os.environ['PACELINE_ROLE'] != 'worker': os._exit(3)\n")
    launch = ["-P", "-m", "paceline", "launch", "-n", "1", "-s", "1", "--allow", "mine:Half"]
    command = [sys.executable, *launch, "--", sys.executable, "src/train.py"]
    places = [str(tmp_path / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "weights [0.5, 0.5]" in ended.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("", 2, "the number of workers is missing; give -n"),
        ("-n 2", 2, "there is no command to run; give it after --"),
        ("-n 0 sh", 2, "number of workers is 0; a job has at least 1 worker"),
        ("-n two sh", 2, "-n/-np/--num-workers: 'two' is not an integer, as in -n 2"),
        ("--num_proc 2 sh", 2, "unknown option '--num_proc'; did you mean '-n'?"),
        ("--ntasks=2 sh", 2, "unknown option '--ntasks=2'; did you mean '-n'?"),
        ("--nproc_per_node 2 -n 2 sh", 2, "--nproc-per-node is the number of workers on each host; leave out -n"),
        ("--nproc-per-node=gpu sh", 2, "'gpu' is not an integer, as in --nproc_per_node 2"),
        ("--ddp --standalone -n 2 sh", 2, "leave it out: the launcher starts the processes of all hosts"),
        ("--ddp -s 0 -n 2 sh", 2, "--ddp needs a server, and the variables of torchrun; leave out -s 0"),
        ("--ddp --no-torchrun-env -n 2 sh", 2, "leave out --no-torchrun-env"),
        ("--shares measured -n 2 sh", 2, "--shares is for DDP scripts, and needs --ddp; a script with a store takes"),
        ("--ddp --shares mesured -n 2 sh", 2, "'mesured' is unknown; did you mean 'measured'?"),
        ("-n 2 -- python -u -W ignore no-such-script.py --lr 1", 127, "the script 'no-such-script.py' does not exist"),
        ("-n 2 --launcher locla sh", 2, "unknown launcher 'locla'; did you mean 'local'?"),
        ("-n 2 --env A sh", 2, "--env 'A' is not NAME=VALUE"),
        ("-n 2 --env PACELINE_JOB_KEY=x sh", 2, "PACELINE_JOB_KEY is set by the launcher"),
        ("-n 2 --staleness soon sh", 2, "staleness='soon' is not an integer"),
        ("-n 2 --timeout 0 sh", 2, "--timeout: '0' is not a number above 0"),
        ("-n 2 --grace nan sh", 2, "--grace: 'nan' is not a number above 0"),
        ("-n 2 -o python=/no/python sh", 2, "launcher 'local' has no options: leave out -o python=..."),
        ("-n 2 --launcher ssh -o pyton=/no/python sh", 2, "has no option 'pyton'; did you mean 'python'?"),
        ("-n 2 -o =1 sh", 2, "-o '=1' is not NAME=VALUE"),
        ("-n 2 --sync-dst-dir /tmp/x sh", 2, "--sync-dst-dir is for launcher ssh, whose hosts -H names"),
        ("-n 2 --launcher slurm -H h1,h2 sh", 2, "launcher 'slurm' gets its hosts from its engine"),
        ("--launcher slurm --nproc-per-node 4 sh", 2, "so --nproc-per-node says no number of workers: give -n"),
        ("-n 2 --launcher sge --sync-dst-dir /tmp/x sh", 2, "launcher 'sge' does not copy a directory"),
        (
            "-n 2 --env-worker PACELINE_STALENES=1 sh",
            2,
            "PACELINE_STALENES is unknown; did you mean",
        ),
        ("-n 2 --dashboard 99999 sh", 2, "dashboard '99999' is not a port, as in 8080, or 0 for any"),
        ("-n 2 --metrics 0.0.0.0 sh", 2, "metrics '0.0.0.0' is not [HOST:]PORT, as in 9464"),
        ("-n 2 --report /no/such/a.html sh", 2, "report '/no/such/a.html' cannot be written: it is no regular file"),
        ("-n 2 --report-to jsonel:a sh", 2, "unknown tool of --report-to 'jsonel'; did you mean 'jsonl'?"),
        ("-n 2 --weighting invers sh", 2, "--weighting 'invers' is unknown; did you mean 'inverse'?"),
        ("-n 2 --on-worker-death go sh", 2, "--on-worker-death: 'go' is unknown; known are continue, stop"),
        ("-n 2 --allow Lion sh", 2, "allow 'Lion' is not pkg.mod:Name, as in mylib.optim:Lion"),
        ("-n 2 --env PACELINE_STALENESS=x sh", 2, "PACELINE_STALENESS='x' is not an integer"),
        ("-n 2 -s 0 --log-dir /proc/nope sh", 2, "--log-dir '/proc/nope' cannot be made: No such file or directory"),
        ("-n 2 -H no-such-file sh", 2, "write commas: -H h1,h2 (of one host: -H no-such-file,)"),
        ("-n 2 -H /tmp sh", 2, "the hostfile '/tmp' cannot be read: Is a directory"),
        ("-n 2 --kv-store dist_sync -- python x.py", 2, "'--kv-store': options of your script come after it, as in"),
        ("--nnodes=2 -n 2 -- python x.py", 2, "'--nnodes=2': -n is the number of all workers and -H names the hosts"),
        ("--rdzv_backend c10d -n 2 -- python x.py", 2, "leave it out: the launcher starts the processes of all hosts"),
        ("-n 2 -m mypkg.train", 2, "name the interpreter, as in: paceline launch -n 2 -- python -m mypkg.train"),
        ("-n 2 --groups no-such-file sh", 2, "cannot be read: No such file or directory; paceline profile and"),
        ("-n 2 no-such-command", 127, "the command 'no-such-command' is not on the PATH"),
        ("-n 2 -s 0 --env-server A=1 sh", 2, "--env-server changes nothing with -s 0"),
        ("-n 2 -s 0 --staleness 2 --insecure sh", 2, "--staleness, --insecure changes nothing with -s 0"),
        ("-n 2 -s 0 --start-timeout 5 sh", 2, "--start-timeout changes nothing with -s 0: then there are workers only"),
        ("-n 99999999 --dry-run sh", 2, "99999999 workers and 99999999 servers are more than the 65536 processes"),
        ("-n 2 -s 0 -i nope sh", 2, "interface 'nope' does not exist on "),
    ],
)
def test_mistake_is_explained_and_starts_nothing(
    words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words.split()]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("paceline launch: ")
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2", "-H", ""], "-H is empty; it takes a hostfile, or a list as in: -H h1,h2"),
        (["--group", "new: n=2, wieght=3"], "group new: unknown 'wieght'; did you mean 'weight'?"),
        (["--group", "new: n=2, args=--lr 1, wieght=3"], "group new: unknown 'wieght'; did you mean 'weight'?"),
        (["--group", "new: n=2; weight=3"], "group new: n=2; weight=3 is not an integer"),
        (["--group", "new: n=2, weight=x"], "group new: weight=x is not a number"),
        (["--group", "new: n=2, args='"], "group new: args: No closing quotation"),
        (["--group", "a: n=2, gpus=1"], "gpus= changes nothing with launcher 'local', but with slurm, k8s, ray"),
        (["--launcher", "k8s", "-o", "image=a", "--group", "a: n=2, hosts=h"], "group a: hosts= changes nothing with"),
        (["--launcher", "ray", "--group", "a: n=2, slots=1"], "group a: slots= changes nothing with launcher 'ray'"),
        (["--group", "a: n=2, env=PACELINE_AGE=x"], "PACELINE_AGE='x' is not an integer"),
    ],
)
def test_mistake_in_one_word_is_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words, "--dry-run", "sh"]) == 2
    assert message in capsys.readouterr().err


def test_value_in_quotes_may_look_like_a_misspelt_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--group", "new: n=2, env=A='1, wieght=3'", "--dry-run", "sh"]) == 0
    assert "A='1, wieght=3'" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-H", "--groups", "--config"])
def test_file_that_is_no_text_is_refused(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    assert main(["launch", "-n", "2", flag, str(tmp_path / "file"), "--dry-run", "sh"]) == 2
    assert "cannot be read: it is not text" in capsys.readouterr().err


def test_every_exit_code_stands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    shown = capsys.readouterr().out.partition("exit code:")[2].partition("\n\n")[0]
    assert {int(code) for code in re.findall(r"\b\d+\b", shown)} >= {0, 2, 127, 130, 143, PEER_FAILED, WORKER_LOST}


def test_dry_run_shows_every_process_and_hides_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = tmp_path / "groups"
    groups.write_text("0 1\n")
    options = f"-n 2 --groups {groups} --staleness 4 --weighting inverse --env PACELINE_AGE=7 --insecure"
    assert main(["launch", *options.split(), "--dry-run", "--", "sh", "-c", "exit 3"]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"job [0-9a-f]{8}: 1 scheduler, 2 servers, 2 workers\n", shown)
    for text in (f"GROUPS={groups}", "STALENESS=4", "WEIGHTING=inverse", "AGE=7", "INSECURE=1"):
        assert shown.count(f"    PACELINE_{text}\n") == 5
    assert "JOB_KEY" not in shown
    assert main(["launch", "-n", "1", "--dry-run", "sh"]) == 0
    assert capsys.readouterr().out.count("PACELINE_JOB_KEY=***\n") == 3


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ("train.py --kv-store dist_gsync", True),
        ("train.py --kv-store=dist_gsync", True),
        ("train.py --kv-store dist_sync", False),
        ("--groups others train.py --kv-store dist_gsync", False),
        ("--group new:n=2 train.py --kv-store dist_gsync", False),
    ],
)
def test_file_groups_is_taken_for_a_command_of_dist_gsync_and_said(
    words: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("groups").write_text("0 1\n")
    Path("others").write_text("1 0\n")
    assert main(["launch", "-n", "2", "--dry-run", *words.split()]) == 0
    found = capsys.readouterr()
    assert (f"PACELINE_GROUPS={tmp_path}/groups\n" in found.out) == taken
    assert ("gets its groups from the file groups of this directory" in found.err) == taken
    monkeypatch.setenv("PACELINE_GROUPS", "auto")
    assert main(["launch", "-n", "2", "--dry-run", *words.split()]) == 0
    assert capsys.readouterr().err == ""


def test_dist_gsync_without_a_file_groups_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "-n", "2", "--dry-run", "train.py", "--kv-store", "dist_gsync"]) == 0
    found = capsys.readouterr()
    assert "PACELINE_GROUPS" not in found.out + found.err


@pytest.mark.parametrize(("host", "is_reached"), [("h1", True), ("localhost", False)])
def test_group_that_names_other_hosts_is_started_by_ssh(
    host: str, is_reached: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--group", f"new: n=2, hosts={host}", "--dry-run", "sh"]) == 0
    assert (f" {host} 'sh -c" in capsys.readouterr().out) is is_reached


def test_options_reach_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--timeout", "9", "--start-timeout", "8"]
    words = ["launch", "-np", "3", "-s", "1", "--allow", "mine:Lion", "--allow", "mine:Tiger", *times, "--dry-run"]
    assert main([*words, "sh"]) == 0
    shown = capsys.readouterr().out
    assert "1 server, 3 workers" in shown
    for text in ("ALLOW=mine:Lion,mine:Tiger", "TIMEOUT_S=9.0", "START_TIMEOUT_S=8.0"):
        assert shown.count(f"    PACELINE_{text}\n") == 5


def test_ddp_script_is_planned_as_torchrun_would_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = "launch --ddp --nproc-per-node 2 -H h1,h2 --dry-run -- train.py --lr 1"
    assert main(words.split()) == 0
    plan = capsys.readouterr().out
    assert len(re.findall(r"\bPACELINE_DDP=1", plan)) == 4
    assert len(re.findall(rf"{re.escape(sys.executable)} train.py --lr 1", plan)) == 4
    assert "WORLD_SIZE=4" in plan
    assert "LOCAL_WORLD_SIZE=2" in plan
    assert "PACELINE_NUM_SERVERS=2" in plan
    assert "PACELINE_ON_WORKER_DEATH=stop" in plan
    assert "TORCHELASTIC_RUN_ID=" in plan


def test_measured_shares_of_a_ddp_script_are_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--ddp", "--shares", "measured", "-n", "2", "--dry-run", "--", "train.py"]) == 0
    plan = capsys.readouterr().out
    assert len(re.findall(r"\bPACELINE_DDP=measured", plan)) == 2
    assert "--ddp --shares measured: " in plan


def test_hosts_may_have_unlike_numbers_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("h1 slots=3\nh2\n")
    assert main(["launch", "--ddp", "--nproc-per-node", "1", "-H", str(hosts), "--dry-run", "--", "sh"]) == 0
    plan = capsys.readouterr().out
    assert "WORLD_SIZE=4" in plan
    assert "LOCAL_WORLD_SIZE=3" in plan
    assert "LOCAL_WORLD_SIZE=1" in plan


def test_variables_of_torchrun_can_be_left_out() -> None:
    script = (
        "env | grep -E '^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)=' ; echo $PACELINE_RANK"
    )
    words = ["launch", "-n", "1", "-s", "0", "--no-torchrun-env", "--", "sh", "-c", script]
    assert paceline(*words, RANK="7", WORLD_SIZE="9").stdout == "[worker 0] 0\n"


def test_workers_run_and_their_output_says_who_they_are() -> None:
    done = paceline("launch", "-n", "2", "-s", "0", "--env", "X=a b", "--", "sh", "-c", 'echo $RANK/$WORLD_SIZE "$X"')
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 0/2 a b", "[worker 1] 1/2 a b"]
    assert (done.returncode, done.stderr) == (0, "")


WORKER = """
import contextlib, os, torch
from pathlib import Path
from paceline import kvstore

store = kvstore.create("dist_sync")
store.init(0, torch.zeros(2))
store.push(0, torch.full((2,), store.rank + 1.0))
store.pull(0, out := torch.zeros(2))
print(store.rank, store.num_workers, out.tolist())
key = os.environ["PACELINE_JOB_KEY"].encode()
lines = []
for process in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it ended meanwhile
        lines.append((process / "cmdline").read_bytes())
assert any(b"paceline" in line for line in lines)
print("key shown" if any(key in line for line in lines) else "key hidden")
"""


def test_job_with_real_roles_trains_and_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    done = paceline("launch", "-n", "2", "-s", "1", "--quiet", "--", sys.executable, str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or "not heard" in done.stderr  # the scheduler tells of a process that got no processor
    assert sorted(done.stdout.splitlines()) == [
        "[worker 0] 0 2 [3.0, 3.0]",
        "[worker 0] key hidden",
        "[worker 1] 1 2 [3.0, 3.0]",
        "[worker 1] key hidden",
    ]


def test_job_whose_workers_all_failed_at_once_does_not_wait_for_its_roles(tmp_path: Path) -> None:
    started = time.monotonic()
    done = programs.run(["-m", "paceline", "launch", "-n", "2", "--grace", "60", "--", "sh", "-c", "exit 3"])
    assert time.monotonic() - started < 30
    assert done.returncode == 3
    assert "did not leave" not in done.stderr


def test_own_master_port_wins() -> None:
    words = ["launch", "-n", "1", "-s", "0", "--", "sh", "-c", "echo $MASTER_ADDR:$MASTER_PORT"]
    assert paceline(*words, MASTER_PORT="29511").stdout == "[worker 0] 127.0.0.1:29511\n"
    assert paceline("launch", "--env", "MASTER_PORT=29512", *words[1:]).stdout == "[worker 0] 127.0.0.1:29512\n"


def test_options_are_few_and_grouped_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(OPTIONS) <= 34
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    for section in ("size:", "hosts:", "environment:", "training:", "running:"):
        assert f"\n{section}\n" in shown


JOB = """
n = 3
num-servers = 1
hosts = "{hosts}"
allow = ["a:B", "c:D"]
command = "sh -c 'echo $X'"
[env]
X = "from the file"
Y = 1
"""


def test_job_file_holds_options_and_the_command_line_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("h1\nh2\n")
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(hosts=tmp_path / "hosts"))
    assert main(["launch", "--config", str(path), "--env", "X=from the line", "-s", "2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1 scheduler, 2 servers, 3 workers" in shown
    assert shown.count("X='from the line'") == 6
    assert shown.count("    Y=1\n") == 6
    assert "PACELINE_ALLOW=a:B,c:D" in shown
    assert "worker 2 on h2\n  sh -c 'echo $X'\n" in shown


def test_job_file_holds_worker_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[group.fast]\nn = 1\nhosts = ["h1"]\n[group.old]\nn = 2\nhosts = "h2"\nenv = {A = "b c"}\n')
    assert main(["launch", "--config", str(path), "--launcher", "ssh", "--dry-run", "--", "sh"]) == 0
    shown = capsys.readouterr().out
    assert "worker 2 on h2, group old\n" in shown
    assert shown.count("    A='b c'\n") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n = [", "is not TOML"),
        pytest.param(f"n = {5000 * '['}{5000 * ']'}", "is not TOML: maximum recursion depth exceeded", id="deep"),
        ("num_worker = 2", "'num_worker' is not an option; did you mean 'num-workers'?"),
        ("num_workers = 'two'", "num_workers: 'two' is not an integer"),
        ("n = 2.5", "n: '2.5' is not an integer"),
        ("n = 2\nnum-workers = 2", "'n' and 'num-workers' are the same option; give one"),
        ("n = 2\ncommand = 3", "command = 3; it is a text, or a list of words"),
        ('n = 2\ncommand = "sh \'"', "No closing quotation"),
        ("n = 2\ninsecure = 'false'", "insecure = 'false' is neither true nor false"),
        ("n = 2\nweighting = 'invers'", "--weighting 'invers' is unknown; did you mean 'inverse'?"),
        ("n = 2\nhosts = []", "-H is empty"),
        ("n = 2\n[env]\nA = [1]", "env.A = [1]; it takes one text or number"),
        ("n = 2\n[launcher]\na = 1", "launcher = {'a': 1}; it takes one text or number"),
        ("config = 'x'", "'config' is not an option; known are"),
        ("[group]\na = 3", "group a: 3 is not a table, as in: n = 2"),
        ("[group.a]\nm = 1", "group a: unknown 'm'"),
        ("[group.a]\nn = 2.7", "group a: n=2.7 is not an integer"),
        ("[group.a]\nn = true", "group a: n=True is not an integer"),
        ("[group.a]\nn = 2\nargs = 3", "group a: args=3 is neither text nor a list"),
        ("[group.a]\nn = 2\nenv = 3", "group a: 3 is not a table of NAME = VALUE"),
    ],
)
def test_wrong_job_file_is_explained(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(text)
    assert main(["launch", "--config", str(tmp_path / "job.toml"), "--", "sh"]) == 2
    assert message in capsys.readouterr().err


def test_job_starts_again_after_a_failure_and_sees_how_often() -> None:
    script = "echo try $PACELINE_RESTART; test $PACELINE_RESTART = 1 || exit 3"
    done = paceline("launch", "-n", "1", "-s", "0", "--max-restarts", "3", "--", "sh", "-c", script)
    assert done.returncode == 0
    assert done.stdout == "[worker 0] try 0\n[worker 0] try 1\n"
    assert "[launch] restart 1 of 3" in done.stderr


def test_variables_may_be_those_of_a_role_or_of_this_shell(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env-worker", "W=1", "--env-server", "S=a,b c", "--env", "HOME", "--dry-run", "sh"]
    assert main(["launch", "-n", "2", "-s", "1", *words]) == 0
    shown = capsys.readouterr().out
    assert (shown.count("    W=1\n"), shown.count("    S='a,b c'\n")) == (2, 2)
    assert shown.count(f"    HOME={os.environ['HOME']}\n") == 4


class Batch(Job):
    """Gets a signal while it is waited for."""

    id, was_cancelled = "7", False

    def __init__(self, signum: signal.Signals) -> None:
        self._signum = signum

    def wait(self) -> int:
        signal.raise_signal(self._signum)
        return 0

    def cancel(self) -> None:
        self.was_cancelled = True


@pytest.fixture
def handled() -> Iterator[Callable[[signal.Signals, Any], None]]:
    """Sets the handler of a signal for the test."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield signal.signal
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_cancels_a_job_that_an_engine_supervises(handled, signum: signal.Signals) -> None:
    before = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    handled(signum, before)
    job = Batch(signum)
    assert (launch._wait(job), job.was_cancelled) == (128 + signum, True)
    assert signal.getsignal(signum) == before


def test_job_goes_on_when_its_terminal_is_closed_under_nohup(handled) -> None:
    handled(signal.SIGHUP, signal.SIG_IGN)
    job = Batch(signal.SIGHUP)
    assert (launch._wait(job), job.was_cancelled) == (0, False)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Could not resolve hostname h1\n-----", "host h1 is unknown: check its name in the hosts file or in "
         "~/.ssh/config (Could not resolve hostname h1)"),
        ("paceline: python has no package psutil, which paceline needs: pip", "host h1 lacks a package: install it"),
        ("connect to host h1 port 4: Connection refused", "how many workers it has is slots=N"),
    ],
)  # fmt: skip
def test_host_that_starts_no_agent_is_told_with_a_way_out(
    said: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ncat >&2 <<END\n{said}\nEND\nexit 255\n")
    ssh.chmod(0o755)
    assert main(["launch", "-n", "1", "-H", "h1,", "-o", f"ssh={ssh}", "--", "true"]) == 1
    assert why in capsys.readouterr().err
