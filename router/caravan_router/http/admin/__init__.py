"""Routes that manage what shards hold; with API keys in force, they need an operator's key."""
