"""Collective operations of all workers: planes that move data, one order of operations, and its negotiation."""
