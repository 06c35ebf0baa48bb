"""The page of a job in a real browser. ``nox -s browser`` runs this."""
