"""What the router knows of one shard: the ledger, its only writer, and the parts it is made of."""
