"""The scripts. Their shapes are those of public training programs; the words are ours."""
