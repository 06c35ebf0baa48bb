"""Files of training state: the format, writing them whole, and checkpoints of several workers."""
