"""Requests that no shard has taken, and their order."""
