"""llama-server's own API, which editor plugins use."""
