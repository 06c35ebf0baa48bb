"""Stores that live in one process: local, device."""
