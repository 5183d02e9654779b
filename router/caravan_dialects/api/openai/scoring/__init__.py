"""Scores of pairs of texts, and documents ranked by them."""
