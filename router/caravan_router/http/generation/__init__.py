"""Generating requests of all dialects: permits, checks, prompts, constraints, runs and answers."""
