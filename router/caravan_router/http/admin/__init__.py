"""Routes that manage what shards hold; they need an operator's key, or without keys a client on this host."""
