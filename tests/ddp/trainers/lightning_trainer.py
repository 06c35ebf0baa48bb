"""Lightning's own DDP: accumulation, clipping, a schedule, validation, logs of all ranks. Writes the weights.

With ``--double`` a step does not depend on the cut of the global batch: no dropout and no batch normalisation.
"""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        middle = [torch.nn.Tanh()] if is_double else [torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), *middle, torch.nn.Linear(16, 3))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("validated", functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


torch.set_num_threads(1)
is_double = "--double" in sys.argv
if is_double:
    torch.set_default_dtype(torch.float64)
pl.seed_everything(1, verbose=False)
data = TensorDataset(torch.randn(90, 6), torch.randint(3, (90,)))
model = Classifier()
trainer = pl.Trainer(
    strategy="ddp", devices=2, num_nodes=1, accelerator="cpu", max_epochs=3, accumulate_grad_batches=2,
    gradient_clip_val=0.5, logger=False, enable_progress_bar=False, default_root_dir=f"{sys.argv[-1]}.folder",
)  # fmt: skip
trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
assert trainer.world_size == 2
if trainer.is_global_zero:
    # Lightning's means over ranks stay unweighted.
    torch.save(model.state_dict() | ({} if is_double else trainer.callback_metrics), sys.argv[-1])
