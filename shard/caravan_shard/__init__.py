"""Caravan's shard: one process, one llama.cpp context, one KV cache. It computes what the router decides."""
