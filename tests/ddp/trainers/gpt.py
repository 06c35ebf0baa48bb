"""A trainer of a small GPT as minGPT has it: DDP, a sampler, clipping, weight decay of some. Writes the weights."""

import os
import sys

import torch
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, LENGTH, WIDTH = 20, 8, 16


class Sorted(Dataset):
    """Sequences, and the same with each number sorted into its place."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return row, row.sort().values


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, future = self.before(x), torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = x + self.attention(normed, normed, normed, attn_mask=future, need_weights=False)[0]
        return x + self.layers(self.after(x))


class Gpt(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.last = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.last(self.blocks(self.words(rows) + self.places(torch.arange(LENGTH))))
        return found, functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # Adam makes steps of rounding errors: keys have biases without gradients
dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(int(os.environ["RANK"]))  # DDP takes the weights of rank 0
model = DistributedDataParallel(Gpt())
decayed = [one for name, one in model.named_parameters() if one.dim() > 1]
rest = [one for name, one in model.named_parameters() if one.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
)
sampler: DistributedSampler = DistributedSampler(Sorted())
loader = DataLoader(Sorted(), batch_size=8, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for rows, wanted in loader:
        _, loss = model(rows, wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), sys.argv[1])
dist.barrier()
dist.destroy_process_group()
