"""The HTTP layer over the engine: what all routes share, and one package for each dialect."""
