"""The way of every generating request, for all dialects: permits, checks, prompt, constraint, runs, answer."""
