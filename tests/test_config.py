from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, get_args

import pytest

from paceline.config import ALIASES, PLACEMENTS, Settings, check, from_environment, parse, variable
from paceline.errors import ConfigError
from paceline.host.cores import share_of
from paceline.layout.placement import PlacementPolicy


def test_defaults_need_no_job() -> None:
    assert from_environment({}) == Settings()


def test_argument_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('num_workers = 2\nnum_servers = 3\nrank = 4\nencrypt = false\njob_id = "lab"\ntimeout_s = 10\n')
    env = {"PACELINE_CONFIG": str(path), "PACELINE_NUM_WORKERS": "5", "PACELINE_NUM_SERVERS": "6"}
    got = from_environment(env, num_workers=7, rank=None)
    assert (got.num_workers, got.num_servers, got.rank) == (7, 6, 4)
    assert (got.encrypt, got.job_id, got.timeout_s) == (False, "lab", 10.0)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PACELINE_NUM_WORKER", "PACELINE_NUM_WORKERS"),
        ("PACELINE_TIMEOUT", "PACELINE_TIMEOUT_S"),
        ("PACELINE_STALENES", "PACELINE_STALENESS"),
        ("PACELINE_INSECUR", "PACELINE_INSECURE"),
    ],
)
def test_misspelt_variable_is_refused_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"the variable {name} is unknown; did you mean {meant}"):
        from_environment({name: "1"})


def test_variable_that_means_nothing_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="PACELINE_FAVOURITE_COLOUR is unknown and changes nothing"):
        from_environment({"PACELINE_FAVOURITE_COLOUR": "blue"})


@pytest.mark.filterwarnings("error")
def test_variables_of_the_launcher_and_of_tests_are_known() -> None:
    names = ("CONFIG", "READY_FD", "ENDED_FD", "TEST_MARKER", "TESTING_FAULTS", "FUZZ_MESSAGES", "UPDATE_ON_KVSTORE")
    from_environment({f"PACELINE_{name}": "" for name in names})


def test_names_of_mxnet_are_accepted_and_weaker_than_ours() -> None:
    env = {
        "DMLC_ROLE": "server", "DMLC_NUM_WORKER": "4", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9091",
        "PACELINE_NUM_WORKERS": "3", "PACELINE_INSECURE": "1",
    }  # fmt: skip
    got = from_environment(env)
    assert (got.role, got.num_workers, got.scheduler, got.insecure) == ("server", 3, "tcp://10.0.0.1:9091", True)
    assert from_environment({"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "10.0.0.1"}).scheduler == ""
    ipv6 = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "fd00::1", "DMLC_PS_ROOT_PORT": "9091"}
    assert from_environment(ipv6, insecure=True).scheduler == "tcp://[fd00::1]:9091"
    assert set(ALIASES.values()) <= set(Settings.__dataclass_fields__)


def test_names_of_mxnet_that_other_systems_set_too_count_only_with_a_role() -> None:
    env = {"DMLC_NUM_WORKER": "4", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9091", "PS_VERBOSE": "1"}
    got = from_environment(env)
    assert (got.num_workers, got.scheduler, got.verbose) == (1, "", 1)


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("local_rank"), "3")
    assert from_environment().local_rank == 3


@pytest.mark.parametrize(("word", "meant"), [("1", True), ("Yes", True), (" on ", True), ("0", False), ("off", False)])
def test_switches_are_words(word: str, meant: bool) -> None:
    assert parse("insecure", word, "here") is meant


def test_blank_text_means_not_given() -> None:
    assert from_environment({"PACELINE_STALENESS": "", "PACELINE_RANK": ""}) == Settings()
    assert parse("staleness", " ", "here") is None
    assert parse("staleness", "2", "here") == 2


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("insecure", "maybe", "0 or 1"),
        ("num_workers", "two", "an integer"),
        ("num_workers", "", "an integer"),
        ("staleness", "1.5", "an integer"),
        ("timeout_s", "soon", "a number"),
    ],
)
def test_text_that_cannot_be_read_names_its_source(field: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"SOURCE='{text}' is not {wanted}"):
        parse(field, text, "SOURCE")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"role": "boss"}, "worker, server or scheduler"),
        ({"num_workers": 0}, "num_workers is 0; it must be at least 1"),
        ({"num_servers": -1}, "num_servers is -1"),
        ({"num_workers": 10**11}, "num_workers is 100000000000; it is at most 1,000,000"),
        ({"local_rank": 2 * 10**6}, "local_rank is 2000000; it is at most 1,000,000"),
        ({"local_rank": -7}, "local_rank is -7; it counts from 0"),
        ({"bigarray_bound": 10**30}, "bigarray_bound is 10{30}; it is at most"),
        ({"weight": float("inf")}, "weight is inf"),
        ({"server_speeds": "inf"}, "server_speeds 'inf' is not a list"),
        ({"job_id": "x" * 3000}, "job_id 'x+ is not a name of at most 200 printable characters"),
        ({"host": "a\x1b[2J"}, r"host 'a\\x1b\[2J' is not a name of at most 253 printable characters"),
        ({"bigarray_bound": 0}, "bigarray_bound"),
        ({"server_threads": -1}, "server_threads"),
        ({"timeout_s": 0.0}, "every wait needs a deadline"),
        ({"start_timeout_s": float("nan")}, "every wait needs a deadline"),
        ({"disconnect_grace_s": -1.0}, "disconnect_grace_s"),
        ({"heartbeat_timeout_s": 0.5}, "longer than heartbeat_interval_s"),
        ({"heartbeat_timeout_s": 60.0}, "raise PACELINE_STALL_TIMEOUT_S too"),
        ({"stall_timeout_s": 0.0}, "every wait needs a deadline"),
        ({"placement": "random"}, "it is balanced, layered or hash"),
        ({"log_level": "loud"}, "DEBUG, INFO, WARNING, ERROR or CRITICAL"),
        ({"server_speeds": "1,fast"}, "one positive number"),
        ({"server_speeds": "1,-2"}, "one positive number"),
        ({"server_speeds": "1,2", "scheduler": "tcp://h:1", "insecure": True}, "each of 1 servers"),
        ({"dashboard": "127.0.0.1:80"}, "dashboard '127.0.0.1:80' is not a port, as in 8080, or 0 for any"),
        ({"dashboard": "70000"}, "dashboard '70000' is not a port"),
        ({"ports": "20000"}, "ports '20000' is not a range of ports, as in 20000-20099"),
        ({"ports": "20-10"}, "ports '20-10' is not"),
        ({"ports": "0-10"}, "ports '0-10' is not"),
        ({"metrics": "port"}, r"metrics 'port' is not \[HOST:\]PORT, as in 9464"),
        ({"metrics": "h:"}, "metrics 'h:' is not"),
        ({"metrics": "1.2.3.4"}, "metrics '1.2.3.4' is not"),
        ({"metrics": "70000"}, "metrics '70000' is not"),
        ({"metrics": "١"}, "metrics '١' is not"),
        ({"staleness": -1}, "0 or more"),
        ({"age": -1}, "missed updates, 0 or more"),
        ({"scheduler": "tcp://h:1"}, "PACELINE_JOB_KEY"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check(Settings().replace(**changes))


def test_known_placements_are_those_that_there_are() -> None:
    assert get_args(PlacementPolicy) == PLACEMENTS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "10.0.0.1", "interface": "eth0"}, "PACELINE_INTERFACE is set and changes nothing: host is set too"),
        ({"server_speeds": "1", "placement": "hash"}, "PACELINE_SERVER_SPEEDS is set and changes nothing: placement"),
    ],
)
def test_setting_that_changes_nothing_is_warned_of_once_in_a_job(changes: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        from_environment({}, role="scheduler", **changes)
    for role in ("worker", "server"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            from_environment({}, role=role, **changes)


@pytest.mark.parametrize("changes", [{"job_key": "k"}, {"insecure": True}])
def test_member_of_a_job_needs_its_key_unless_the_job_is_insecure(changes: dict[str, Any]) -> None:
    member = Settings(scheduler="tcp://h:1")
    with pytest.raises(ConfigError, match="PACELINE_JOB_KEY"):
        check(member)
    assert member.replace(**changes) == from_environment({"PACELINE_SCHEDULER": "tcp://h:1"}, **changes)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"num_worker = 2", "unknown settings num_worker"),
        (b"num_workers = [", "job.toml"),
        pytest.param(b"num_workers = " + 5000 * b"[" + 5000 * b"]", "job.toml: maximum recursion depth", id="deep"),
        (b"job_id = '\xff'", "job.toml"),
        (b"num_workers = 'x'", "job.toml: num_workers='x'"),
    ],
)
def test_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        from_environment({"PACELINE_CONFIG": str(path)})


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        from_environment({"PACELINE_CONFIG": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("cores", "members", "threads"), [(2, 2, 1), (2, 5, 1), (16, 4, 4), (64, 2, 8), (8, 0, 8), (3, 2, 1)]
)
def test_server_takes_its_share_of_the_cores(cores: int, members: int, threads: int) -> None:
    assert share_of(cores, members) == threads


@pytest.mark.parametrize(
    ("members", "changes", "interval_s"),
    [
        (5, {}, 0.5),
        (40, {}, 0.5),
        (60, {}, 0.75),
        (80, {}, 1.0),
        (1000, {}, 1.0),
        (1000, {"heartbeat_timeout_s": 8.0}, 2.0),
        (1000, {"heartbeat_timeout_s": 1.0}, 0.5),
        (1000, {"heartbeat_interval_s": 1.5}, 1.5),
        (40, {"heartbeat_interval_s": 0.1}, 0.5),
        (4, {"heartbeat_interval_s": 0.1}, 0.1),
    ],
)
def test_members_of_large_jobs_send_fewer_heartbeats(
    members: int, changes: dict[str, float], interval_s: float
) -> None:
    settings = Settings(num_workers=members - 1, num_servers=1).replace(**changes)
    assert settings.beat_interval_s == interval_s
