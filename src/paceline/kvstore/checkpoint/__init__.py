"""Files of training state: the format, atomic writes, and checkpoints of several workers."""
