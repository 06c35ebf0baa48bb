"""A loop of accelerate: accumulation, clipping, a schedule, and metrics that are gathered. Writes the weights."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
set_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
data = TensorDataset(torch.randn(90, 6), torch.randint(3, (90,)))
model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in loader]
    assert sum(len(labels) for _, labels in found) == len(data)
assert accelerator.num_processes == 2
accelerator.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
accelerator.end_training()
