"""Proposes draft tokens, with which a sequence may continue. A step verifies them. Knows no model and no cache."""
