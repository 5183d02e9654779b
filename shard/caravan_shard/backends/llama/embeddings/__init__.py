"""Embeddings and ranks, in contexts of their own."""
