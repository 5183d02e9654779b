"""API keys from a file: who may send requests, and how many."""
