"""Jobs on cluster managers: a backend for each. Code shared with plain hosts is in :mod:`paceline.launch`."""
