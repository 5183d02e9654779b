"""`caravan serve`: shards as child processes over Unix sockets, and a router, on one host."""
