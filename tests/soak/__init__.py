"""Jobs that run for a long time: memory, descriptors, threads and tables of every process must not grow."""
