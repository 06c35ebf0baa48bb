"""Training in the manner of MXNet, and its spellings of what paceline has."""
