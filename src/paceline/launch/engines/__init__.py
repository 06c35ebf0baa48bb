"""Jobs on cluster managers: a backend for each. What they share with plain hosts is in :mod:`paceline.launch`."""
