"""What operators see and change of the prefixes that shards hold."""
