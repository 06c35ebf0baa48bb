"""The roles: a shell of threads, sockets and clocks around the pure parts."""
