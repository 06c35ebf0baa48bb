"""Stores inside one process: local, device."""
