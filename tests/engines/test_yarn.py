"""The launcher yarn against a stand-in for the ResourceManager that honours the documented REST contract."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines import jobs
from tests.engines.yarn_stand_in import Yarn

pytestmark = pytest.mark.timeout(400)

OPTIONS = ["-o", "memory=1024", "-o", "address=127.0.0.1"]


@pytest.fixture
def yarn(tmp_path: Path) -> Iterator[Yarn]:
    (tmp_path / "containers").mkdir()
    with Yarn(tmp_path / "containers") as made:
        yield made
        assert made.services == {}


def launcher(yarn: Yarn) -> Callable[[Sequence[str]], list[str]]:
    def launch(words: Sequence[str]) -> list[str]:
        start = [jobs.PYTHON, "-m", "paceline", "launch", "--launcher", "yarn", "-o", f"rm={yarn.url}"]
        return [*start, *OPTIONS, *words]

    return launch


@pytest.mark.slow
def test_mnist_trains(yarn: Yarn, tmp_path: Path) -> None:
    jobs.check_trains(launcher(yarn), tmp_path)


def test_failing_worker_ends_the_job_with_its_code_and_traceback(yarn: Yarn) -> None:
    jobs.check_failure(launcher(yarn))


def test_key_travels_in_a_file_of_this_user_that_is_gone_at_the_end(yarn: Yarn, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    words = ["-n", "1", "-s", "0", "-o", f"key-folder={folder}"]
    seen = 'for one in "$1"/*; do stat -c "key file %a" "$one"; cp "$one" "$2"; done'
    done = jobs.start(launcher(yarn), words, ["sh", "-c", seen, "sh", str(folder), str(tmp_path / "key")]).end()
    assert done.code == 0, done.text
    assert "key file 600" in done.out
    assert list(folder.iterdir()) == []
    key = (tmp_path / "key").read_text()
    assert len(key) == 40
    assert key not in str(yarn.bodies)
    assert "see the key" not in done.text


def test_key_in_the_service_is_said_to_be_readable(yarn: Yarn) -> None:
    done = jobs.start(launcher(yarn), ["-n", "1", "-s", "0"], ["true"]).end()
    assert done.code == 0, done.text
    assert "the network on the way there, and who may read this service, see the key" in done.text


def test_ctrl_c_leaves_nothing(yarn: Yarn) -> None:
    jobs.check_end(launcher(yarn), lambda job: job.process.send_signal(signal.SIGINT), 130)


def test_kill_of_the_launcher_leaves_nothing(yarn: Yarn, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    words = ["-n", "2", "-s", "0", "-o", f"key-folder={folder}"]
    job = jobs.start(launcher(yarn), words, ["sh", "-c", "exec sleep 300"])
    job.wait_until(lambda: sum("sleep 300" in line for line in job.processes().values()) == 2)
    job.process.kill()
    job.end()
    job.check_gone()
    jobs.wait_for(lambda: yarn.services == {})
    assert list(folder.iterdir()) == []


def test_groups_restarts_and_values_with_quotes(yarn: Yarn) -> None:
    """Both groups fail once and are started again in the same containers."""
    text = 'echo $PACELINE_WORKER_GROUP $PACELINE_RESTART "$NOTE" "$1" "$2"; test $PACELINE_RESTART = 1'
    groups = ["--group", "fast: n=2, cpus=2, memory=2Gi", "--group", "slow: n=1, args=more, env=NOTE='a, \"$b\"'"]
    words = ["-s", "0", "--max-restarts", "2", *groups]
    done = jobs.start(launcher(yarn), words, ["sh", "-c", text, "sh", "it's $x"]).end()
    assert done.code == 0, done.text
    lines = {line for line in done.out.splitlines() if " 1 " in line}
    assert lines == {
        "[worker 0] fast 1  it's $x ", "[worker 1] fast 1  it's $x ", '[worker 2] slow 1 a, "$b" it\'s $x more',
    }, done.text  # fmt: skip
    [body] = yarn.bodies
    assert [(one["name"], one["number_of_containers"], one["resource"]) for one in body["components"]] == [
        ("worker-fast", 2, {"cpus": 2, "memory": "2048"}),
        ("worker-slow", 1, {"cpus": 1, "memory": "1024"}),
    ]


def test_mistakes_end_with_a_sentence(yarn: Yarn) -> None:
    cases = [
        (["--group", "a: n=1, memory=9Gi"], "YARN refused: Requested more memory than configured max 8192"),
        (["-n", "20", "-o", "wait=4"], "YARN has started 16 of 20 containers within 4 s (STARTED): ask for less"),
        (["-n", "1", "-o", "python=/none"], "YARN has ended the service before it ran (FAILED): worker-0 exited with "),
        (["-n", "1", "-o", "rm=http://127.0.0.1:1"], "no ResourceManager answers at http://127.0.0.1:1 ("),
        (["-n", "1", "-o", f"port={yarn.url.rpartition(':')[2]}"], "cannot be used here: Address already in use"),
    ]
    for words, message in cases:
        done = jobs.start(launcher(yarn), ["-s", "0", *words], ["true"]).end(60)
        assert done.code == 1, done.text
        assert f"paceline launch: {message}" in done.err or message in done.err, done.text
        assert "Traceback" not in done.err
    yarn.enabled = False
    done = jobs.start(launcher(yarn), ["-s", "0", "-n", "1"], ["true"]).end(60)
    assert "yarn.webapp.api-service.enable=true" in done.err, done.text
