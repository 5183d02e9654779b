"""The shell around the schedulers, one for each model: an event loop, a gRPC channel to each shard, token streams."""
