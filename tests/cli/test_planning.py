"""``paceline plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main

JOB = ["--model", "resnet50", "--gpus", "64", "--per-host", "8", "--rate", "760", "--batch", "256", "--nic", "25Gbit"]


def test_tables_and_recommendation_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    assert main(["plan", *JOB, "--price-per-hour", "24.48", "--plot", str(picture)]) == 0
    about, efficiency, times, costs, scaling, sentences = capsys.readouterr().out.split("\n\n")
    assert about.splitlines()[:2] == [
        "model: 25.56 M parameters, 102.2 MB of gradients; an epoch has 1281167 samples",
        "64 workers on 8 hosts: 336.8 ms per step of 256 samples without an exchange",
    ]
    assert efficiency.splitlines()[1].split() == ["servers", "1", "8", "16", "8", "0"]
    assert efficiency.splitlines()[4].split() == ["local", "merge", "39%", "83%", "84%", "85%", "85%"]
    assert len(efficiency.splitlines()) == len(times.splitlines()) == len(costs.splitlines()) == 10
    assert scaling.splitlines()[-1].split()[0] == "10000"
    assert sentences.startswith("Use dist_sync with 8 servers, one on each host of workers: 99% efficiency")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_what_the_tables_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ways"]) == 40
    assert {one["workers"] for one in found["scaling"]} == {*(2**power for power in range(14)), 10_000}
    assert found["recommended"]["way"]["layout"] == "co-located"
    seed = {"layout": "one server", "overlap": False, "merge": True, "compression": ""}
    (one,) = [one for one in found["ways"] if one["way"] == seed]
    assert 0.38 < one["efficiency"] < 0.40


def test_slow_network_is_advised_to_take_local_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "resnet50", "--gpus", "4", "--rate", "100", "--nic", "200Mbit"]
    assert main(["plan", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Local steps, at some loss: periods of 16 steps, int8 both ways, answers up to 4 steps late: 95% of the time "
        "is computation.",
        '  paceline.DistributedOptimizer(..., local_steps="16 by speed", delay=4, '
        'compression={"type": "int8", "leg": "both"})',
    ]
    assert main(["plan", *words[:-1], "25Gbit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["local"] is None


def test_speeds_of_a_profile_are_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speeds"
    path.write_text("0 0.100\n1 0.102\n2 0.101\n")
    assert main(["plan", "--speeds", str(path), "--bytes", "44MB", "--nic", "1Gbit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "model: 11 M parameters, 44 MB of gradients; an epoch has 1281167 samples",
        "3 workers on 3 hosts: 101 ms per step of 32 samples without an exchange",
    ]


def test_step_of_unlike_workers_is_that_of_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speeds"
    path.write_text("0 0.045\n1 0.077\n")
    assert main(["plan", "--speeds", str(path), "--bytes", "44MB", "--nic", "1Gbit"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("2 workers on 2 hosts: 45 to 77 ms per step")


def test_cluster_file_says_workers_links_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[[workers]]\ncount = 4\nbatch_s = 0.5\nbandwidth = 1e8\n[servers]\nbandwidth = 2e8\n[model]\nbytes = 4e7"
    )
    assert main(["plan", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "4 workers on 4 hosts: 500 ms per step of 32 samples without an exchange",
        "links: 0.8 Gbit/s, those of servers 1.6; 0 ms per message",
    ]
    assert main(["plan", str(path), "--nic", "1Gbit"]) == 2
    assert "--nic has no use here: links are those of" in capsys.readouterr().err


def without(*flags: str) -> list[str]:
    pairs = zip(JOB[::2], JOB[1::2], strict=True)
    return [word for pair in pairs if pair[0] not in flags for word in pair]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (without("--model"), "--model or --bytes is missing"),
        (without("--gpus"), "--gpus is missing: the number of workers"),
        (without("--nic"), "--nic is missing: the rate of a host's link"),
        (without("--rate"), "a cluster file, --speeds or --rate; nothing was given"),
        ([*JOB, "--speeds", "x"], "a cluster file, --speeds or --rate; --speeds and --rate was given"),
        ([*JOB, "--model", "resnet51"], "--model: 'resnet51' is unknown; did you mean 'resnet50'"),
        ([*JOB, "--bytes", "1MB"], "--model and --bytes both say the size of the model"),
        ([*without("--model"), "--bytes", "large"], "--bytes: 'large' is not a size, as in 102MB"),
        ([*JOB, "--nic", "25"], "--nic: '25' is not a rate with its unit, as in 25Gbit"),
        ([*JOB, "--nic", "0Gbit"], "--nic: '0Gbit' is not a rate"),
        ([*JOB, "--server-nic", "1.2.3GB"], "--server-nic: '1.2.3GB' is not a rate"),
        ([*JOB, "--gpus", "0"], "--gpus: 0 is too small; it is at least 1"),
        ([*JOB, "--gpus", "10000001"], "--gpus: 10000001 is too large; it is at most 1000000"),
        ([*JOB, "--rate", "-1"], "--rate: '-1' is not a number above 0"),
        ([*JOB, "--batch", "x"], "--batch: 'x' is not an integer"),
        ([*JOB, "--latency", "-1"], "--latency: -1 is too small"),
        ([*JOB, "--compression", "fp61"], "--compression: 'fp61' is unknown; did you mean 'fp16'"),
        ([*JOB, "--plot", "/nowhere/plan.png"], "--plot /nowhere/plan.png cannot be written: No such file"),
        ([*JOB, "--plot", "plan"], "--plot plan: its format follows from its name"),
        ([*JOB, "--server-price-per-hour", "3"], "--server-price-per-hour needs --price-per-hour"),
        ([*JOB, "--plot", "plan.xyz"], "--plot plan.xyz: Format 'xyz' is not supported"),
        (["a", "b", *JOB], "give one cluster file, not 2"),
        ([*without("--rate"), "--speeds", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_names_the_flag(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert why in printed.err
    assert not printed.out
