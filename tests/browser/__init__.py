"""The page of a job in a real browser. ``make test-browser`` runs this."""
