"""The HTTP layer over the engine: code that all routes share, and one package per dialect."""
