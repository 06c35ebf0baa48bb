"""The training script of a trial: ``worker.py FOLDER`` goes through all phases, and does its fault to itself."""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), int(os.environ["PACELINE_RANK"])
trial = json.loads((folder / "trial.json").read_text())
is_culprit = (trial["role"], trial["rank"]) == ("worker", rank)
if is_culprit and trial["slow"]:
    atexit.register(time.sleep, 1.5)  # runs after paceline's own

import torch  # noqa: E402

from paceline import kvstore  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402

ROUNDS = 40


def enter(phase: str) -> None:
    """Say that a phase begins, and commit the fault of this phase."""
    (folder / f"{phase}-{rank}").touch()
    if is_culprit and phase == trial["phase"]:
        fault(trial["fault"])


def fault(kind: str) -> None:
    time.sleep(random.Random(trial["seed"]).random() * 0.2)
    if "the job failed" not in (folder / "output").read_text():  # else a busy host has ended it: too late to be blamed
        (folder / "deed").touch()
    match kind:
        case "raise":
            raise ArithmeticError("the loss is not a number")
        case "exit3":
            sys.exit(3)
        case "SystemExit3":
            raise SystemExit(3)
        case "os._exit3":
            os._exit(3)
        case "os._exit0":
            os._exit(0)
        case "leave":
            sys.exit(0)


def train() -> None:
    enter("start")
    time.sleep(0.3)
    store = kvstore.create("dist_sync", namespace="blame")
    enter("joined")
    store.set_updater("add")
    store.init("w", torch.zeros(10_000))
    value = torch.ones(10_000)
    for number in range(ROUNDS):
        if number == ROUNDS // 4:
            enter("rounds")
        store.push("w", value)
        if number == ROUNDS // 2:
            enter("mid-round")
        store.pull("w", out=value)
        time.sleep(0.02)
    enter("barrier")
    if rank == 0:
        time.sleep(0.5)
    store.barrier()
    enter("end")
    store.close()
    enter("left")


try:
    train()
except PacelineError as error:
    if trial["catch"]:  # a script that handles errors itself, and ends with an exit code of its own
        print(error, file=sys.stderr)
        sys.exit(1)
    raise
