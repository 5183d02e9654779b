"""Requests that no shard has taken: their order, their tenants' shares, their deadlines."""
