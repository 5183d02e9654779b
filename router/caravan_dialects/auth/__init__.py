"""API keys as values: what a key may ask for, and how many of its requests may run."""
