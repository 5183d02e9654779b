"""A deterministic model for tests, with the rules of the real one."""
