"""Jobs on a busy machine: `python -m tests.busy`."""
