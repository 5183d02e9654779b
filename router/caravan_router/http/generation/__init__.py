"""Serves generating requests of all dialects: their model, permits, runs and responses."""
