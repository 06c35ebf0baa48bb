"""Planes: what moves the data of an operation, once all ranks are ready for it."""
