"""The distributed store: keys on the servers of a job."""

from paceline.kvstore.dist.store import DistStore

__all__ = ["DistStore"]
