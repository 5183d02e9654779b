"""The shell around the scheduler: one event loop, a gRPC channel to each shard, a token stream per request."""
