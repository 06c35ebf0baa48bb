"""A forked child can go on with networks of several devices, and with stores of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paceline

SOURCES = str(Path(paceline.__file__).parents[1])

SCRIPT = """
import os, sys, torch
from paceline import gluon
from paceline.mx.context import cpu

def fork_with(store):
    torch.manual_seed(0)
    net = gluon.replicate(torch.nn.Linear(4, 2), [cpu(0), cpu(1)])
    trainer = gluon.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, store)
    data = torch.randn(8, 4)

    def step():
        outputs = net(gluon.split_and_load(data, net.contexts))
        gluon.backward([one.square().sum() for one in outputs])
        trainer.step(8)
        return net.state_dict()["weight"].double().sum().item()

    step()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writes, repr(step()).encode())
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    print(store, os.waitstatus_to_exitcode(status), os.read(reads, 100).decode() == repr(step()), flush=True)

for store in ("local", "device"):
    fork_with(store)
"""


def test_child_steps_as_its_parent_would() -> None:
    env = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=170, check=False)
    assert ended.stdout == "local 0 True\ndevice 0 True\n", ended.stderr
