"""The worker's side of a distributed store."""
