"""Stops shards while calls of every kind run, and checks how shards and calls end."""
