"""The sequences a shard holds, and those swapped out."""
