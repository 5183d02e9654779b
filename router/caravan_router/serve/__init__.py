"""The command `caravan serve`: a router, and shards as its child processes, on one host."""
