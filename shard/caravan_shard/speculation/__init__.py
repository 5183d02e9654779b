"""Proposes draft tokens, which a step verifies: out of the texts of sequences, or by a draft model."""
