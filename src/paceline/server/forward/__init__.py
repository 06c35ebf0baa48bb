"""Sums of one host, forwarded to the servers that own their buckets."""
