"""What a router asks and a shard answers, as the shard's own types."""
