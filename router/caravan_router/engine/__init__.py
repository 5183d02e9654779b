"""The shell around the scheduler: one event loop, gRPC channels to the shards, a token stream per request."""
