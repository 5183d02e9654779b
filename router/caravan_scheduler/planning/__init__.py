"""Decides what each shard does next: reads ledgers and the queue, and calls their operations."""
