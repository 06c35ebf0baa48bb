"""The worker's end of a distributed store."""
