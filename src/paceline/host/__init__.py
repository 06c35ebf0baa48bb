"""This host: processes, files, forks, cores, interfaces, clocks of a busy machine."""
