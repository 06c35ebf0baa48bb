"""The Trainer of transformers: trains, evaluates and predicts with a small BERT. Writes the weights."""

import sys
import tempfile

import torch
from torch import distributed as dist
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)
set_seed(1)


class Words(Dataset):
    """Words whose number modulo 3 is the label."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words[0] % 3}


config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                    max_position_embeddings=16, num_labels=3)  # fmt: skip
options = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, use_cpu=True,
    eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, learning_rate=1e-3,
)  # fmt: skip
trainer = Trainer(BertForSequenceClassification(config), options, train_dataset=Words(), eval_dataset=Words())
trainer.train()
assert trainer.predict(Words()).predictions.shape == (48, 3)
assert dist.get_world_size() == 2
if dist.get_rank() == 0:
    torch.save(trainer.model.state_dict(), sys.argv[1])
dist.barrier()
dist.destroy_process_group()
