"""Completions of one or several prompts."""
