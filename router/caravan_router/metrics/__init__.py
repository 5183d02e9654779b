"""Counts and measures what the router does, under TGI's names where TGI has the metric."""
