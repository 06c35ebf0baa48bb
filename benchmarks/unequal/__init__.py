"""Modes of synchronising on machines of three speeds, real and simulated: ``make bench-unequal``."""
