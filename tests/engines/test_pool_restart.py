"""A job of ``paceline launch --max-restarts`` goes on in the middle of an epoch of its pool."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.clusters import programs

#: The weights count how often each sample was trained on.
SCRIPT = """
import os, signal, torch, paceline

store = paceline.kvstore.create("dist_async")
net = torch.nn.ParameterList([torch.zeros(97)])
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), kvstore=store, model=net)
sampler = paceline.data.PooledBatchSampler(97, store, batch_size=4, stop_every=30)
step = 0
if os.path.exists("job.ckpt"):
    step, extra = paceline.load("job.ckpt", net, optimizer)
    sampler.load_state_dict(extra["sampler"])
while sampler.next_epoch < 2:
    for indices in sampler:
        optimizer.zero_grad()
        net[0][indices].sum().backward()
        optimizer.step()
        if store.rank == 1 and step >= 1 and os.environ["PACELINE_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    step += 1
    paceline.save("job.ckpt", net, optimizer, step=step, extra={"sampler": sampler.state_dict()})
paceline.load("job.ckpt", net, optimizer)
if store.rank == 0:
    print("trained", sorted(set(net[0].tolist())), step, flush=True)
store.close()
"""


def test_job_that_is_started_again_trains_on_each_sample_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "-n", "2", "-s", "1", "--max-restarts", "1", "--on-worker-death", "stop", "--"]
    done = programs.run(["-m", "paceline", *words, sys.executable, "train.py"], cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[launch] restart 1 of 1" in done.stderr
    assert "trained [-2.0] 8" in done.stdout
