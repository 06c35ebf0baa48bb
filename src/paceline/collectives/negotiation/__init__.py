"""Negotiation: which operations are ready on all ranks, and in which order all ranks run them. Pure."""
