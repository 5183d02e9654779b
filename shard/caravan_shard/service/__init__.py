"""The shard as a gRPC server: its life, its lease, its health."""
