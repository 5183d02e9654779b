"""Routes that manage what shards hold. Where there are API keys, they need an operator's."""
