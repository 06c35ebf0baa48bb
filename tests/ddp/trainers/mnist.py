"""A trainer as PyTorch's MNIST example is, with DDP: convolutions, dropout, Adadelta, a schedule, a shared test."""

import os
import sys

import torch
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(1, 8, 3), torch.nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = torch.nn.Dropout(0.25), torch.nn.Dropout(0.5)
        self.fc1, self.fc2 = torch.nn.Linear(16 * 5 * 5, 32), torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


def digits(count: int, seed: int) -> TensorDataset:
    """Bright bars on noise: the digit is the row of the bar."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.rand(count, 1, 14, 14, generator=generator)
    images[torch.arange(count), 0, labels + 2] += 1
    return TensorDataset(images, labels)


def train(model: torch.nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        functional.nll_loss(model(images), labels).backward()
        optimizer.step()


def test(model: torch.nn.Module, loader: DataLoader) -> torch.Tensor:
    """Return loss and right answers of all ranks."""
    model.eval()
    found = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            found[0] += functional.nll_loss(output, labels, reduction="sum").item()
            found[1] += (output.argmax(dim=1) == labels).sum()
    dist.all_reduce(found, op=dist.ReduceOp.SUM)
    return found


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    if "--double" in sys.argv:
        torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(1)
    data = digits(240, seed=2)
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    tests = DataLoader(Subset(digits(60, seed=3), range(rank, 60, size)), batch_size=30)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    found = []
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer)
        found.append(test(model, tests))
        scheduler.step()
    if rank == 0:
        torch.save(model.module.state_dict() | {"tests": torch.stack(found)}, sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
