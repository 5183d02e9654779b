"""Conversations that the router keeps: chains of immutable nodes, and named heads that point into them."""
