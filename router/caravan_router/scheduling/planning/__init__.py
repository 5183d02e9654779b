"""Decides what each shard does next."""
