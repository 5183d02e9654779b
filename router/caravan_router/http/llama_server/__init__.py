"""llama-server's own routes, which editor plugins use."""
