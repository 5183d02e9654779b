"""What the router knows of one shard."""
