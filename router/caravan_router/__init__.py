"""Caravan's router: HTTP in, a scheduler that decides every step, gRPC out to the shards."""
