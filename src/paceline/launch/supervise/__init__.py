"""Run the processes of a plan on this machine, show their output, and end all of them in any case."""
