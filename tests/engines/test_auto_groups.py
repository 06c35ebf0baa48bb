"""A whole job of ``paceline launch --groups auto``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.clusters import programs

SCRIPT = """
import time
import torch
import paceline

store = paceline.kvstore.create("dist_gsync")
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
for _ in range(60 if store.session.settings.profile else 3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.01 if store.rank == 1 else 0.1)
    optimizer.step()
print("trained in groups", store.policy.groups)
"""


def test_workers_are_measured_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "-n", "2", "-s", "1", "--groups", "auto", "--", sys.executable, "train.py"]
    done = programs.run(["-m", "paceline", *words], cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained in groups") == 2
    groups = done.stdout.rpartition("trained in groups ")[2].strip()
    assert groups == "((1,), (0,))"


AUTO = """
import sys
import time
import torch
import paceline

store = paceline.kvstore.create("dist_auto")
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
sampler = paceline.data.batch_sampler(640, store, batch_size=8)
for batch in sampler:
    optimizer.zero_grad()
    model(torch.ones(len(batch), 4)).sum().backward()
    time.sleep((0.01 if store.rank else 0.06) + (0.005 if store.rank else 0.03) * len(batch))
    optimizer.step()
if store.rank == 0:
    print("trained as", store.policy.merge, type(sampler).__name__, flush=True)
    status = paceline.cli.main(["status", "--json"])
store.close()
"""


def test_dist_auto_trains_as_it_chose_and_status_says_why(tmp_path: Path) -> None:
    """Batches by speed or a pool: on a busy machine the measurement may speak for either."""
    (tmp_path / "train.py").write_text(AUTO.replace("import paceline\n", "import paceline.cli\n"))
    words = ["launch", "-n", "2", "-s", "1", "--groups", "auto", "--", sys.executable, "train.py"]
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = programs.run(["-m", "paceline", *words], env=env, cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [said] = [line for line in done.stdout.splitlines() if line.startswith("dist_auto: ")]
    assert "worker 0 takes up to" in said
    sync = said.startswith("dist_auto: dist_sync with batches by speed")
    assert f"trained as {'all SharedBatchSampler' if sync else 'each PooledBatchSampler'}" in done.stdout
    assert json.dumps(said.removeprefix("dist_auto: ")) in done.stdout, "paceline status says it too"
