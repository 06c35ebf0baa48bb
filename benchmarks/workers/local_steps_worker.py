"""Worker of the benchmark of slow networks: steps that only wait, or a small model of characters that learns."""

import json
import pydoc_data.topics
import sys
import time

import torch
from torch import nn
from torch.nn import functional

import paceline

_CONTEXT, _HELD_OUT = 32, 40_000


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    found = learn(task) if "seed" in task else wait(task)
    print(json.dumps(found), flush=True)


def wait(task: dict) -> dict:
    """Return the share of the time in which this worker's steps take place, over some periods after the first ones.

    A step waits as long as an accelerator would compute, and then runs a real optimizer on all weights. In the first
    periods ``auto`` decides.
    """
    model = nn.ParameterList([nn.Parameter(torch.zeros(task["numel"] // 8)) for _ in range(8)])
    generator = torch.Generator().manual_seed(paceline.kvstore.create("dist_sync").rank)
    for param in model:
        param.grad = torch.randn(param.shape, generator=generator)
    inner = Timed(model.parameters(), lr=1e-3)
    inner.step_s = task["step_s"]
    store = paceline.kvstore.create("dist_sync")
    began = time.monotonic()
    optimizer = paceline.DistributedOptimizer(inner, store, samples=1, **task["options"])
    starts_s = time.monotonic() - began
    periods, taken, measured, waited_s, cpu_s = 0, 0, 0.0, 0.0, 0.0
    while periods < task["warm"] + task["periods"]:
        if periods == task["warm"] and not measured:
            measured, inner.seconds, taken = time.monotonic(), 0.0, 0
            waited_s, cpu_s = store.session.waited_s, time.thread_time()
        optimizer.step()
        taken += 1
        periods += not optimizer._merging._progress.taken if "local_steps" in task["options"] else 1
    wall_s = time.monotonic() - measured
    found = {"computing": inner.seconds / wall_s, "taken": taken, "wall_s": wall_s, "starts_s": starts_s}
    found |= {"waited_s": store.session.waited_s - waited_s, "cpu_s": time.thread_time() - cpu_s}
    auto = getattr(optimizer._merging, "_auto", None)
    found["plan"] = str(auto.plan) if auto is not None else ""
    store.barrier()
    optimizer.close()
    return found


class Timed(torch.optim.SGD):
    """An optimizer whose steps are timed, with a wait before each."""

    step_s = seconds = 0.0

    def step(self, closure=None):
        began = time.monotonic()
        time.sleep(self.step_s)
        super().step(closure)
        self.seconds += time.monotonic() - began


# ---- a model that learns ---------------------------------------------------------------------------------------------


def text() -> torch.Tensor:
    """Return real English, the help texts of Python, as numbers of characters."""
    words = "\n".join(pydoc_data.topics.topics.values())
    known = {one: number for number, one in enumerate(sorted(set(words)))}
    return torch.tensor([known[one] for one in words])


class Characters(nn.Module):
    """A transformer of one layer over characters."""

    def __init__(self, kinds: int, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.characters, self.places = nn.Embedding(kinds, width), nn.Embedding(_CONTEXT, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.characters(x) + self.places.weight
        parts = self.attend(self.norms[0](h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.join(functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        h = h + self.narrow(functional.gelu(self.wide(self.norms[1](h))))
        return self.head(self.norms[2](h))


def learn(task: dict) -> dict:
    """Train; return the loss on text that was held out."""
    data = text()
    train, held_out = data[:-_HELD_OUT], data[-_HELD_OUT:]
    torch.manual_seed(task["seed"])
    model = Characters(int(data.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"], weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task["lr"], total_steps=task["total"] + 1, pct_start=0.1)
    rank, batch = 0, task["batch"]
    if task["options"] is not None:
        store = paceline.kvstore.create("dist_sync")
        rank = store.rank
        optimizer = paceline.DistributedOptimizer(optimizer, store, model=model, **task["options"])
    generator = torch.Generator().manual_seed(1000 * task["seed"] + rank)
    for _ in range(task["total"]):
        starts = torch.randint(len(train) - _CONTEXT - 1, (batch,), generator=generator)
        windows = torch.stack([train[start : start + _CONTEXT + 1] for start in starts.tolist()])
        optimizer.zero_grad()
        functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if task["options"] is not None and "local_steps" in task["options"]:
        optimizer.exchange_now()
    return {"loss": evaluated(model, held_out)}


def evaluated(model: nn.Module, held_out: torch.Tensor) -> float:
    model.eval()
    whole = held_out[: (len(held_out) - 1) // _CONTEXT * _CONTEXT + 1]
    x, y = whole[:-1].view(-1, _CONTEXT), whole[1:].view(-1, _CONTEXT)
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(some).flatten(0, 1), wanted.flatten(), reduction="sum").item()
            for some, wanted in zip(x.split(64), y.split(64), strict=True)
        ]
    return sum(losses) / y.numel()


if __name__ == "__main__":
    main()
