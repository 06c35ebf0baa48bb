"""A trainer as PyTorch's ImageNet example is when it is started for ``env://``: a residual network with BatchNorm, SGD
with momentum, meters that are reduced over the ranks, a rest of the validation set, a checkpoint that training resumes
from. With ``--multiprocessing-distributed`` a process of its own trains. On a CPU too it wraps its model, which the
example does on GPUs only."""

import argparse
import os
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Block(torch.nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(outside)
        self.conv2 = torch.nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1:
            shorter = torch.nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.downsample = torch.nn.Sequential(shorter, torch.nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(out + (x if self.downsample is None else self.downsample(x)))


def network() -> torch.nn.Module:
    stem = (torch.nn.Conv2d(3, 8, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True))
    blocks = (Block(8, 8, 1), Block(8, 16, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    return torch.nn.Sequential(*stem, *blocks, torch.nn.Linear(16, 10))


class FakeImages(Dataset):
    """Noise around one colour and texture per class; every image is made from its own number."""

    def __init__(self, count: int, first: int) -> None:
        self.numbers = range(first, first + count)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = self.numbers[index]
        generator = torch.Generator().manual_seed(number)
        label = number % 10
        image = torch.randn(3, 16, 16, generator=generator)
        image[label % 3, :: 1 + label // 3] += 2
        return image, label


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.sum += value * n
        self.count += n

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = float(total[0]), int(total[1])


def right(output: torch.Tensor, target: torch.Tensor) -> float:
    return 100.0 * (output.argmax(dim=1) == target).double().mean().item()


def batches(loader: DataLoader, args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for images, target in loader:
        yield images.to(torch.get_default_dtype()), target


def train(loader: DataLoader, model: torch.nn.Module, criterion: torch.nn.Module, optimizer: torch.optim.Optimizer,
          args: argparse.Namespace) -> None:  # fmt: skip
    model.train()
    for images, target in batches(loader, args):
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader: DataLoader, model: torch.nn.Module, args: argparse.Namespace) -> float:
    """Return the share of right answers over all ranks: each has its part, and all have the rest."""
    meter = AverageMeter()
    model.eval()

    def add(one: DataLoader) -> None:
        with torch.no_grad():
            for images, target in batches(one, args):
                meter.update(right(model(images), target), images.size(0))

    add(loader)
    meter.all_reduce()
    seen = len(loader.sampler) * args.world_size
    if seen < len(loader.dataset):
        add(DataLoader(Subset(loader.dataset, range(seen, len(loader.dataset))), args.batch_size))
    return meter.sum / meter.count


def run(args: argparse.Namespace, epochs: int, resume: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    start, best = 0, 0.0
    if resume:
        checkpoint = torch.load(resume, map_location="cpu")
        start, best = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    trained, tested = FakeImages(250, 0), FakeImages(70, 1000)
    train_sampler = DistributedSampler(trained)
    loader = DataLoader(trained, args.batch_size, sampler=train_sampler, num_workers=args.workers)
    tests = DataLoader(tested, args.batch_size, sampler=DistributedSampler(tested, shuffle=False, drop_last=True))
    for epoch in range(start, epochs):
        train_sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, args)
        best = max(best, validate(tests, model, args))
        scheduler.step()
        if args.rank % int(os.environ["LOCAL_WORLD_SIZE"]) == 0 and args.rank == 0:
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best}
            torch.save(
                state | {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, args.checkpoint
            )
    dist.barrier()
    return model.state_dict() | {"best": torch.tensor(best)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--world-size", default=-1, type=int)
    parser.add_argument("--rank", default=-1, type=int)
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--dist-backend", default="gloo")
    parser.add_argument("--batch-size", default=10, type=int)
    parser.add_argument("--workers", default=1, type=int)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--multiprocessing-distributed", action="store_true")
    args = parser.parse_args()
    args.checkpoint = f"{args.path}.checkpoint"
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    if args.multiprocessing_distributed:
        of_this_node = 1  # as the example counts where there is no GPU
        args.world_size = of_this_node * args.world_size
        multiprocessing.spawn(main_worker, nprocs=of_this_node, args=(of_this_node, args))
    else:
        main_worker(0, 1, args)


def main_worker(gpu: int, of_this_node: int, args: argparse.Namespace) -> None:
    if args.dist_url == "env://" and args.rank == -1:
        args.rank = int(os.environ["RANK"])
    if args.multiprocessing_distributed:
        args.rank = args.rank * of_this_node + gpu
    if args.double:
        torch.set_default_dtype(torch.float64)
    dist.init_process_group(args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    run(args, 2)
    found = run(args, 3, args.checkpoint)
    if args.rank == 0:
        torch.save(found, args.path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
