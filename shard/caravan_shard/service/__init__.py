"""The shard as a gRPC server: start, lease, commands, health, drain, end."""
