"""Training loops of plain PyTorch users, in a job and in one process that sees the joined batch: the same weights."""
