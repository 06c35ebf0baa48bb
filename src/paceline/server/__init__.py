"""The process that owns buckets: merges pushes by the rule, applies them, serves values."""
