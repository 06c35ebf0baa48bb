"""Modes of synchronising on machines of three speeds, real and simulated: ``nox -s bench-unequal``."""
